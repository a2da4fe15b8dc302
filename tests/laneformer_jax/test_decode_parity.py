"""Cached decoding equals the full forward pass, at every length and however the prompt is cut.

The full pass is the oracle's. Two layers slide over W keys and two see everything: a cache that forgets
too early or too late shows at lengths W−1, W, W+1 and 2W.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import forward
from parity import library_model
from shapes import random_tensors

from decode import generate
from decode.step import xla_step
from laneformer_jax import LaneformerConfig
from laneformer_jax.cache import RingCache

W = 6
TOKENS, SLOTS = 2 * W + 3, 2 * W + 7
EDGES = (W - 1, W, W + 1, 2 * W)
CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "num_lanes": 2,
    "broadcast_delay": 1,
    "sliding_window": W,
    "sliding_window_n_layers": 2,
}
TENSORS = random_tensors(CONFIG, seed=5)
IDS = np.random.default_rng(0).integers(32, size=(2, TOKENS)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return library_model(CONFIG, TENSORS)


@pytest.fixture(scope="module")
def feed(model):
    """feed(cache, ids) -> logits of these tokens, and the cache with them in it."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def step(params, cache, ids):
        model = nnx.merge(graphdef, params)
        x, cache = xla_step(model, model.local_lanes(), ids, cache)
        return model.logits(x, model.local_lanes()), cache

    def feed(cache, ids):
        return step(params, cache, ids)

    return feed


def in_chunks(feed, sizes, ids, pads=0):
    """Logits [B,S,V] of ids taken up chunk by chunk, the first `pads` of every row being padding."""
    config = LaneformerConfig.from_dict(CONFIG)
    ahead = max(sizes)
    cache = RingCache.empty(config, len(ids), SLOTS, ahead, jnp.float32, config.num_lanes)
    cache = cache._replace(length_B=jnp.broadcast_to(-jnp.asarray(pads, jnp.int32), len(ids)))
    logits, at = [], 0
    for size in sizes:
        chunk, cache = feed(cache, ids[:, at : at + size])
        logits.append(np.asarray(chunk))
        at += size
    assert at == ids.shape[1]
    return np.concatenate(logits, axis=1)


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def whole():
    return forward(TENSORS, CONFIG, IDS).logits


@pytest.mark.smoke
def test_token_by_token(feed, whole):
    close(in_chunks(feed, [1] * TOKENS, IDS), whole)


@pytest.mark.parametrize("length", EDGES)
def test_prefill_to_a_window_edge_then_one_by_one(feed, whole, length):
    close(in_chunks(feed, [length] + [1] * (TOKENS - length), IDS), whole)


@st.composite
def cuts(draw):
    sizes = []
    while sum(sizes) < TOKENS:
        left = TOKENS - sum(sizes)
        sizes.append(draw(st.sampled_from([s for s in (1, 2, 3, 7) if s <= left])))
    return sizes


@given(cuts())
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_uneven_chunks(feed, whole, sizes):
    close(in_chunks(feed, sizes, IDS), whole)


def test_left_padding_in_uneven_chunks(feed):
    """Rows of 15, 9 and 1 real tokens; chunks that end within the padding, at its end and behind it."""
    pads = np.array([0, 6, 14])
    ids = np.concatenate([IDS, IDS[:1, ::-1]])
    for sizes in ([3, 3, 7, 2], [7, 7, 1]):
        got = in_chunks(feed, sizes, ids, pads)
        for row, pad in enumerate(pads):
            close(got[row, pad:], forward(TENSORS, CONFIG, ids[row : row + 1, pad:]).logits[0])


@pytest.mark.parametrize(
    "prompt", [pytest.param(n, marks=() if n == W else pytest.mark.slow) for n in (1, *EDGES)]
)
def test_generated_tokens_are_the_full_passes(model, prompt):
    """Every step's logits, and so every greedy token, from the edge on to beyond twice the window."""
    out = generate(model, IDS[:, :prompt], max_new_tokens=2 * W + 2, return_logits=True)
    ids = np.concatenate([IDS[:, :prompt], out.tokens], axis=1)
    want = forward(TENSORS, CONFIG, ids).logits[:, prompt - 1 : -1]
    close(out.logits, want)
    np.testing.assert_array_equal(out.tokens, want.argmax(-1))


@pytest.mark.parametrize("chunk", [5, pytest.param(7, marks=pytest.mark.slow)])
def test_generate_with_a_chunked_prefill(model, chunk):
    whole = generate(model, IDS, max_new_tokens=4, return_logits=True)
    cut = generate(model, IDS, max_new_tokens=4, prefill_chunk=chunk, return_logits=True)
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    close(cut.logits, whole.logits)
