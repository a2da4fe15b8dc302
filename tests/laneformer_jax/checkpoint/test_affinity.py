"""Affinity-aware sharding: exact where it must be, better by its own measure, and its measure checked."""

import dataclasses
import itertools

import dense_llama
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_llama import FAMILIES, write

from laneformer_jax import cli
from laneformer_jax.checkpoint import affinity, dense, native, verify
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import train_tokenizer

CONFIG = dict(FAMILIES["llama"], num_key_value_heads=8, num_hidden_layers=4, head_dim=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors = dense_llama.random_tensors(CONFIG, seed=1)
    return write(tmp_path_factory.mktemp("affinity") / "dense", CONFIG, tensors)


def ids_of(seed: int, shape=(2, 24)) -> np.ndarray:
    return np.random.default_rng(seed).integers(CONFIG["vocab_size"], size=shape)


def test_the_calibration_model_is_the_dense_model(folder):
    split = dense.DenseFolder(folder, 4, 1)
    flat = {p: jnp.asarray(affinity._flat(p, v)) for p, v in verify.read_all(split).items()}
    ids = ids_of(0)
    probes = affinity._probes((*ids.shape, split.config))
    loss, _ = affinity._loss(probes, flat, jnp.asarray(ids), split.config)
    tensors = dense_llama.random_tensors(CONFIG, seed=1)
    want = []
    for row in ids:
        logits = dense_llama.logits(CONFIG, tensors, row)[:-1]
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        want.append(-log_p[np.arange(len(row) - 1), row[1:]])
    assert float(loss) == pytest.approx(np.mean(want), abs=1e-5)


def test_coupling_is_the_first_order_change_of_the_loss(folder):
    """The change that one writer's absence makes in one reader's input, times the loss's slope there."""
    split = dense.DenseFolder(folder, 4, 1)
    params = verify.read_all(split)
    ids = ids_of(0)
    found = affinity.modules(split.config, params, ids)
    reader, writer = found[5], found[3]  # MLPs of layers 2 and 1
    flat = {p: jnp.asarray(affinity._flat(p, v)) for p, v in params.items()}
    probes = affinity._probes((*ids.shape, split.config))
    grads, (acts, rms) = jax.grad(affinity._loss, has_aux=True)(
        probes, flat, jnp.asarray(ids), split.config
    )
    r, c = 7, 11
    want = 0.0
    for name in ("w1", "w3"):
        row = flat[f"layers.2.feed_forward.{name}.weight"][r] * flat["layers.2.ffn_norm.weight"]
        column = flat["layers.1.feed_forward.w2.weight"][:, c]
        change = (
            acts["layers.1.feed_forward"][..., c] * (row @ column) / rms["layers.2.feed_forward"]
        )
        slope = grads[f"layers.2.feed_forward.{name}"][..., r]
        want += float(jnp.abs(slope * change).sum())
    assert affinity.coupling(reader, writer)[r, c] == pytest.approx(want, rel=1e-4)


def test_only_missed_pairs_couple(folder):
    split = dense.DenseFolder(folder, 4, 1)
    found = affinity.modules(split.config, verify.read_all(split), ids_of(0))
    # δ = 1: module 2 and 3 (layer 1) are the first whose partials come late; each is missed by two readers.
    assert sorted(affinity.coupling_matrices(found, 1)) == [
        (3, 2),
        (4, 2),
        (4, 3),
        (5, 3),
        (5, 4),
        (6, 4),
        (6, 5),
        (7, 5),
        (7, 6),
    ]
    assert not affinity.coupling_matrices(found, 4)


def test_assignment_is_that_of_an_exhaustive_search():
    rng = np.random.default_rng(0)
    for units, lanes in ((4, 4), (6, 3), (8, 2)):
        gain = rng.normal(size=(units, lanes))
        seats = np.arange(units) // (units // lanes)
        best = max(
            sum(gain[unit, lane] for unit, lane in enumerate(deal))
            for deal in set(itertools.permutations(seats))
        )
        lane = affinity.balanced_assignment(gain)
        np.testing.assert_array_equal(np.bincount(lane, minlength=lanes), units // lanes)
        assert gain[np.arange(units), lane].sum() == pytest.approx(best)


def test_planted_groups_are_found():
    """Three modules of 16 units in 4 hidden groups: dealt so that nothing is separated."""
    rng = np.random.default_rng(0)
    groups = [rng.permutation(np.arange(16) // 4) for _ in range(3)]
    couplings = {
        (reader, writer): (groups[reader][:, None] == groups[writer]).astype(float)
        for reader, writer in ((1, 0), (2, 0), (2, 1))
    }
    lanes = affinity.deal(couplings, [16] * 3, 4)
    contiguous = [affinity.contiguous_lanes(16, 4)] * 3
    assert affinity.separated(couplings, contiguous) > 50
    for lane in lanes:
        np.testing.assert_array_equal(np.bincount(lane), [4] * 4)
    assert affinity.separated(couplings, lanes) < 0.5 * affinity.separated(couplings, contiguous)


@pytest.mark.parametrize("lanes", [2, 8])
def test_reordered_lanes_are_the_dense_model_and_separate_less(folder, lanes, lane_logits):
    split = dense.DenseFolder(folder, lanes, 1)
    params = verify.read_all(split)
    order = affinity.affinity_order(split.config, params, ids_of(0))
    for layer in order:
        assert sorted(layer.kv_heads) == list(range(8))
        assert sorted(layer.neurons) == list(range(CONFIG["intermediate_size"]))
    assert any((layer.neurons != np.arange(len(layer.neurons))).any() for layer in order)
    reordered = dense.DenseFolder(folder, lanes, 1, order=order)
    ids = ids_of(1, (40,))
    want = dense_llama.logits(CONFIG, dense_llama.random_tensors(CONFIG, seed=1), ids)
    got = lane_logits(reordered, ids, broadcast_delay=4)
    np.testing.assert_allclose(got, want, atol=5e-5, rtol=0)
    couplings = affinity.coupling_matrices(affinity.modules(split.config, params, ids_of(0)), 1)

    def separated(order) -> float:
        counts = (8, CONFIG["intermediate_size"])
        pairs = [pair for layer in order for pair in zip(counts, layer, strict=True)]
        lane_of = [affinity.contiguous_lanes(n, lanes)[np.argsort(units)] for n, units in pairs]
        return affinity.separated(couplings, lane_of)

    others = [separated(affinity.random_order(split.config, seed)) for seed in range(20)]
    # Beyond chance: further below the random layouts than they spread.
    assert separated(order) < min(others) - (max(others) - min(others))


def test_through_the_command_line(folder, tmp_path, capsys):
    text = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(400))
    (tmp_path / "text.py").write_text(text)
    tensors = dense_llama.random_tensors(dict(CONFIG, vocab_size=300), seed=2)
    source = write(tmp_path / "dense", dict(CONFIG, vocab_size=300), tensors)
    train_tokenizer([text], 300, source)
    command = ["import", str(source), str(tmp_path / "out"), "--lanes", "4", "--delay", "1"]
    assert cli.main([*command, "--layout", "affinity"]) == 2
    assert "--calibration" in capsys.readouterr().err
    short = tmp_path / "short.py"
    short.write_text("x")
    layout = ["--layout", "affinity", "--calibration"]
    assert cli.main([*command, *layout, str(short)]) == 2
    assert "tokens, needs 256 at least" in capsys.readouterr().err
    assert cli.main([*command, *layout, str(tmp_path / "text.py"), "--verify"]) == 0
    assert "equal the dense model's within" in capsys.readouterr().out
    model = native.load_model(tmp_path / "out")
    dense_model = dataclasses.replace(model.config, broadcast_delay=4)
    plain = dense.DenseFolder(source, 4, 1)
    assert not np.array_equal(
        np.asarray(model.layers[2].feed_forward.w1.weight[...]),
        verify.read_all(plain)["layers.2.feed_forward.w1.weight"],
    )
    with pytest.raises(UserError, match="cannot be read as text"):
        affinity.calibration_ids(tmp_path / "none", None, dense_model)
