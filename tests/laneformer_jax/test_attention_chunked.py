"""Attention in chunks: the plain path's numbers, memory in proportion to the sequence, nothing read outside
the window; and which path runs when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import largest

from laneformer_jax.attention import attend
from laneformer_jax.attention_chunked import chunked_attend
from laneformer_jax.attention_paths import Sight, choose, self_attend

L, B, S, K, G, D = 2, 2, 37, 2, 2, 8


def inputs(seq=S):
    rng = np.random.default_rng(0)
    shapes = ((L, B, seq, K, G, D), (L, B, seq, K, D), (L, B, seq, K, D), (L, B, seq, K, G, D))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def sight(packed, padded):
    rng = np.random.default_rng(1)
    segments = np.sort(rng.integers(1, 4, (B, S)), axis=1).astype(np.int32)
    valid = np.arange(S) < np.array([[S - 6], [S]])
    return Sight(valid if padded else None, segments if packed else None)


def value_and_gradients(f, q, k, v, d_out):
    def both(q, k, v):
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(d_out)

    return [np.asarray(x) for x in jax.jit(both)(q, k, v)]


@pytest.mark.parametrize(
    ("window", "packed", "padded"),
    [
        (None, True, False),
        (11, True, True),
        pytest.param(1, False, False, marks=pytest.mark.slow),
        pytest.param(None, False, True, marks=pytest.mark.slow),
        pytest.param(16, False, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_give_the_plain_paths_numbers(window, packed, padded):
    q, k, v, d_out = inputs()
    seen = sight(packed, padded)
    if padded:  # what a padding query computes is never read
        d_out = d_out * seen.key_valid_BS[None, :, :, None, None, None]
    mask = seen.mask(S, window)
    want = value_and_gradients(lambda q, k, v: attend(q, k, v, mask), q, k, v, d_out)
    got = value_and_gradients(
        lambda q, k, v: chunked_attend(
            q,
            k,
            v,
            window=window,
            key_valid_BS=seen.key_valid_BS,
            segment_BS=seen.segment_BS,
            chunk=8,
        ),
        q,
        k,
        v,
        d_out,
    )
    read = np.ones((B, S), bool) if seen.key_valid_BS is None else seen.key_valid_BS
    np.testing.assert_allclose(got[0][:, read], want[0][:, read], atol=2e-6)
    for a, b in zip(got[1:], want[1:], strict=True):
        # A query that sees one key has no gradient: what is left is the round-off of terms as large as
        # the values' gradient, which cancel.
        scale = np.abs(want[3] if window == 1 else b).max()
        np.testing.assert_allclose(a, b, atol=2e-6 * scale)


def test_keys_outside_the_window_are_not_touched():
    q, k, v, _ = inputs()
    k[:, :, :8] = v[:, :, :8] = np.nan  # the first chunk
    out = np.asarray(chunked_attend(q, k, v, window=9, chunk=8))
    assert np.isnan(out[:, :, :16]).all()  # whoever's window reaches it shares a chunk with it
    assert np.isfinite(out[:, :, 16:]).all()


@pytest.mark.parametrize("window", [None, 512])
def test_memory_is_in_proportion_to_the_sequence(window):
    """Forward and backward, at 4,096 tokens: no array beyond inputs and a chunk's scores."""

    def loss(q, k, v):
        segments = jnp.ones((1, q.shape[2]), jnp.int32)
        return jnp.sum(chunked_attend(q, k, v, window=window, segment_BS=segments) ** 2)

    sizes = {}
    for seq in (2048, 4096):
        shape = (1, 1, seq, 1)
        q, kv = jnp.zeros((*shape, 1, 64)), jnp.zeros((*shape, 64))
        sizes[seq] = largest(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, kv, kv).jaxpr)
    assert sizes == {2048: 2048 * 64, 4096: 4096 * 64}


@pytest.mark.smoke
def test_which_path_runs():
    def path(seq, device="cpu", dtype=jnp.bfloat16, batch=8, head_size=96, whole=False):
        return choose(batch, seq, head_size, dtype, whole, device)

    assert path(128) == path(255) == "plain"
    assert path(256) == path(4096) == "chunked"
    assert path(4096, "rocm") == "chunked"
    assert path(4096, "cuda") == path(128, "cuda") == "cudnn"
    assert path(4096, "cuda", batch=64) == "chunked"  # a mask of 2 GB
    assert path(4096, "cuda", batch=64, whole=True) == "cudnn"
    assert path(4096, "cuda", dtype=jnp.float32) == "chunked"
    assert path(4096, "cuda", head_size=100) == path(4095, "cuda") == "chunked"


@pytest.mark.parametrize("window", [None, 11])
def test_cudnn_is_asked_for_the_plain_paths_numbers(window, monkeypatch):
    """cuDNN itself needs a GPU; its arguments mean the same to JAX's own implementation."""
    real = jax.nn.dot_product_attention
    asked = []

    def stand_in(*args, implementation, **kwargs):
        asked.append(implementation)
        return real(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v, _ = inputs()
    for seen in (Sight(None, None), sight(packed=True, padded=False)):
        mask = seen.mask(S, window)
        given = None if seen.segment_BS is None else mask
        got = self_attend("cudnn", q, k, v, seen, window, given)
        np.testing.assert_allclose(got, attend(q, k, v, mask), atol=2e-6)
    assert asked == ["cudnn", "cudnn"]
