"""What each remat policy keeps for the backward pass, counted by shape."""

from collections import Counter

import jax
import numpy as np
import pytest

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.remat import check_remat
from train.step import Plan, loss_sum

N, L, ROWS, TOKENS, HIDDEN = 5, 4, 2, 256, 24
CONFIG = LaneformerConfig(
    vocab_size=40,
    hidden_size=HIDDEN,
    head_dim=4,
    intermediate_size=64,
    num_hidden_layers=N,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=TOKENS,
    num_lanes=L,
    broadcast_delay=2,
    use_early_comm=False,
)


def kept(remat):
    """Shapes of what the forward pass leaves for the backward pass, parameters and batch aside."""
    plan = Plan(CONFIG, remat=remat)
    params = plan.abstract_params()
    ids = np.ones((ROWS, TOKENS), np.int32)
    batch = dict(tokens=ids, targets=ids, segment_ids=ids, positions=ids, loss_mask=ids * 1.0)

    def pull(params):
        return jax.vjp(lambda p: loss_sum(p, batch, plan, plan.specs(params), False)[0], params)[1]

    return Counter(leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(pull, params)))


@pytest.fixture(scope="module")
def whole():
    return kept("none")


STREAMS = (L, ROWS, TOKENS, HIDDEN)


def test_at_most_two_streams_a_layer(whole):
    """A module's input each; the delayed term is a sum, which no gradient needs. And the last norm's."""
    layer = kept("layer")
    assert layer[STREAMS] <= 2 * N + 1
    # Beside them nothing is kept that is wider than a dense model's stream, but for the logits.
    logits = (ROWS, TOKENS, CONFIG.vocab_size)
    wide = [
        {s for s in k if np.prod(s) > ROWS * TOKENS * HIDDEN} - {logits} for k in (layer, whole)
    ]
    assert wide[0] == {STREAMS} < wide[1]


def test_attention_outputs_are_kept_when_asked():
    layer, attention = kept("layer"), kept("attention")
    more = attention - layer
    assert not layer - attention
    # Output and log-sum-exp in chunks of 128: [2,L,B,K,G,128(,d)].
    assert more == {(2, L, ROWS, 1, 2, 128, 4): N, (2, L, ROWS, 1, 2, 128): N}


def test_policies_are_checked():
    with pytest.raises(UserError, match=r"did you mean 'layer'"):
        check_remat("layers")
    if jax.default_backend() == "cpu":
        with pytest.raises(UserError, match="offload needs devices with memory of their own"):
            check_remat("offload")
