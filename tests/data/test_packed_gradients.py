"""What packing leaves unchanged in a model: losses, gradients, and each document's logits."""

import jax
import numpy as np
import pytest
from batch_rows import packed
from flax import nnx

from data.documents import IGNORE
from laneformer_jax import Laneformer
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.model import parameter_paths
from train.step import Plan, gradients

WINDOW, SEQ = 8, 136
# One token, the window exactly, and about a block of 128; with 8 between two others, a boundary
# between documents is at the edge of a window.
LENGTHS = (127, WINDOW, 1, 129, WINDOW - 1, 64)
CONFIG = LaneformerConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=SEQ,
    sliding_window=WINDOW,
    swa_layers=(0, 2),
)


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    out = []
    for n in LENGTHS:
        ids = rng.integers(3, 64, n + 1).astype(np.int32)
        example = np.stack([ids[:-1], ids[1:]], axis=1)
        example[1 : n // 3, 1] = IGNORE  # as in what a user says
        out.append(example)
    return out


@pytest.fixture(scope="module")
def together(examples):
    """All documents in three rows, and three rows of nothing."""
    (batch,) = packed(examples, SEQ, "best_fit", bins=8, batch=6)
    rows = (batch["segment_ids"].max(axis=1) > 0).sum()
    assert rows == 3
    return batch


@pytest.fixture(scope="module")
def apart(examples):
    """A row for each."""
    rows = [packed([e], SEQ, "best_fit", batch=1)[0] for e in examples]
    return {k: np.concatenate([r[k] for r in rows]) for k in rows[0]}


@pytest.fixture(scope="module")
def run():
    """Loss and gradients of a batch."""
    model = Laneformer(CONFIG, rngs=nnx.Rngs(0))
    params = {path: v[...] for path, v in parameter_paths(nnx.state(model)).items()}
    plan = Plan(model.config, None)
    compiled = jax.jit(lambda batch: gradients(params, batch, plan))

    def call(batch):
        (loss, *_), grads = compiled(batch)
        return float(loss), {path: np.asarray(g) for path, g in grads.items()}

    return call


def test_gradients_of_packed_documents_are_those_of_each_by_token(run, together, apart):
    loss, grads = run(together)
    loss_apart, grads_apart = run(apart)
    assert np.isfinite(loss)
    assert loss == pytest.approx(loss_apart, rel=1e-6)
    for path, grad in grads.items():
        scale = np.abs(grads_apart[path]).max()
        assert scale > 0, path
        np.testing.assert_allclose(grad, grads_apart[path], atol=2e-5 * scale, err_msg=path)


def test_targets_without_loss_do_not_matter(run, together):
    masked = together["loss_mask"] == 0
    other = {**together, "targets": np.where(masked, 5, together["targets"]).astype(np.int32)}
    loss, grads = run(together)
    changed, changed_grads = run(other)
    assert masked.any()
    assert changed == loss
    assert all(np.array_equal(grads[path], changed_grads[path]) for path in grads)
