"""A ring in blocks against a whole one: the same attention, and blocks out of use are never read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer_jax import cache, cache_blocks
from laneformer_jax.attention import attend_ring

LANES, HEADS, GROUP, D = 2, 1, 2, 4


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (1, [1]),
        (256, [256]),
        (257, [256, 1]),
        (2048, [256, 256, 512, 1024]),
        (3000, [256, 256, 512, 1024, 952]),
    ],
)
def test_each_block_is_as_long_as_all_before_it(slots, expected):
    assert [end - start for start, end in cache_blocks.bounds(slots)] == expected
    keys, values = cache_blocks.empty(3, slots, D, jnp.float32)
    assert cache_blocks.slots_of(keys) == slots
    assert [v.shape for v in values] == [(3, r, D) for r in expected]


@pytest.mark.parametrize(
    ("slots", "window", "lasts", "seq"),
    [
        (7, 5, [4, 18], 3),  # one block
        (260, None, [255, 3], 2),  # across the border of the first
        (530, None, [300], 1),  # a third one, not in use
        (530, 5, [1100], 3),  # a ring that came round
    ],
)
def test_the_same_attention_as_a_whole_ring(slots, window, lasts, seq):
    batch = len(lasts)
    heads = LANES * batch * HEADS
    keys_MRd, values_MRd = normal(0, 2, heads, slots, D)
    position_BS = jnp.asarray(lasts, jnp.int32)[:, None] + jnp.arange(seq, dtype=jnp.int32)
    k_LBSKd, v_LBSKd = normal(1, 2, LANES, batch, seq, HEADS, D)
    q_LBSKGd = 2 * normal(2, LANES, batch, seq, HEADS, GROUP, D)
    mask_BSR = cache.visible(position_BS, slots, window)
    used = int(position_BS.max()) + 1

    spans = cache_blocks.bounds(slots)
    out_of_use = [jnp.where(start < used, 0, jnp.nan) for start, _ in spans]
    keys = [
        keys_MRd[:, a:b].swapaxes(1, 2) + nan for (a, b), nan in zip(spans, out_of_use, strict=True)
    ]
    values = [values_MRd[:, a:b] + nan for (a, b), nan in zip(spans, out_of_use, strict=True)]
    new = k_LBSKd, v_LBSKd, position_BS
    keys, values = jax.jit(cache_blocks.put)(tuple(keys), tuple(values), *new)
    out = jax.jit(cache_blocks.attend)(q_LBSKGd, keys, values, mask_BSR, used)

    put = jax.jit(cache.put)
    keys_MRd = put(keys_MRd, k_LBSKd, position_BS)
    values_MRd = put(values_MRd, v_LBSKd, position_BS)
    for (a, b), key, value, nan in zip(spans, keys, values, out_of_use, strict=True):
        if nan == 0:
            np.testing.assert_array_equal(key.swapaxes(1, 2), keys_MRd[:, a:b])
            np.testing.assert_array_equal(value, values_MRd[:, a:b])
    expected = jax.jit(attend_ring)(q_LBSKGd, keys_MRd, values_MRd, mask_BSR)
    np.testing.assert_allclose(out, expected, atol=2e-6)
