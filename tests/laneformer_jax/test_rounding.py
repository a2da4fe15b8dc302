"""Where bfloat16 rounds, bit for bit: norms, sums across lanes, scaled outputs, residual streams.

The expected values are numpy float32 arithmetic rounded by ml_dtypes where the reference rounds. Each
test also shows that the nearest wrong order would give other bits.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from laneformer_jax import Laneformer, LaneformerConfig
from laneformer_jax.exchange import LaneExchange, Lanes
from laneformer_jax.norms import LaneRMSNorm, RMSNorm

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
LANES, DIM = 8, 64


def bf16(x):
    return np.asarray(x, np.float32).astype(BF16)


def wide(x):
    return np.asarray(x).astype(np.float32)


def bits_differ(a, b):
    return np.mean(wide(a) != wide(b))


def normalised(x):
    """float32 x / sqrt(mean(x²) + eps), and where no float32 error can flip its rounding."""
    exact = wide(x).astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + EPS)
    safe = bf16(exact * (1 + 2e-6)) == bf16(exact * (1 - 2e-6))
    return exact.astype(np.float32), safe


@pytest.fixture
def x():
    return bf16(np.random.default_rng(0).normal(size=(LANES, 2, 16, DIM)) * 3)


@pytest.mark.smoke
def test_shared_norm_rounds_once_after_its_weight(x):
    weight = bf16(np.random.default_rng(1).uniform(0.5, 1.5, DIM))
    norm = RMSNorm(DIM, EPS, jnp.bfloat16)
    norm.weight[...] = jnp.asarray(weight)
    got = np.asarray(jax.jit(norm)(x))
    unit, _ = normalised(x)
    want = unit.astype(np.float64) * wide(weight)
    safe = bf16(want * (1 + 2e-6)) == bf16(want * (1 - 2e-6))
    assert safe.mean() > 0.995
    np.testing.assert_array_equal(wide(got)[safe], wide(bf16(want))[safe])
    assert bits_differ(bf16(wide(bf16(unit)) * wide(weight)), bf16(want)) > 0.1


@pytest.mark.smoke
def test_lane_norm_rounds_before_its_scale_and_after(x):
    scale = bf16(np.random.default_rng(1).uniform(0.5, 1.5, (LANES, DIM)))
    norm = LaneRMSNorm(LANES, DIM, EPS, jnp.bfloat16)
    norm.scale[...] = jnp.asarray(scale)
    got = np.asarray(jax.jit(norm)(x))
    unit, safe = normalised(x)
    scale = wide(scale)[:, None, None]
    want = bf16(wide(bf16(unit)) * scale)
    assert safe.mean() > 0.995
    np.testing.assert_array_equal(wide(got)[safe], wide(want)[safe])
    assert bits_differ(bf16(unit * scale), want) > 0.1


@pytest.mark.parametrize("weight", [1.0, 1.007, 0.5])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_shared_norm_at_any_size(weight, size):
    x = bf16(np.random.default_rng(2).normal(size=(1, 1, 64, DIM)) * size)
    norm = RMSNorm(DIM, EPS, jnp.bfloat16)
    norm.weight[...] = jnp.full(DIM, weight, jnp.bfloat16)
    want = normalised(x)[0].astype(np.float64) * float(bf16(weight))
    safe = bf16(want * (1 + 2e-6)) == bf16(want * (1 - 2e-6))
    np.testing.assert_array_equal(wide(jax.jit(norm)(x))[safe], wide(bf16(want))[safe])


def exchange(layer, *streams_and_outputs, **fields):
    """The residual streams after the given module outputs, first at `layer`, then at layer + δ …"""
    config = LaneformerConfig(
        hidden_size=DIM,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=64,
        vocab_size=8,
        broadcast_delay=2,
        **fields,
    )

    @jax.jit
    def run(pairs):
        traffic = LaneExchange(config, Lanes(LANES))
        return [
            traffic.add(layer + config.broadcast_delay * i, "mlp", x, y)
            for i, (x, y) in enumerate(pairs)
        ]

    return [np.asarray(out) for out in run(streams_and_outputs)]


@pytest.fixture
def y():
    """Multiples of 1/64 below 4: their float32 sums are exact, whatever the order."""
    return [
        bf16(np.random.default_rng(i).integers(-255, 256, size=(LANES, 2, 4, DIM)) / 64)
        for i in range(2)
    ]


def summed_step_by_step(y):
    total = np.zeros_like(y[0])
    for lane in y:
        total = total + lane
    return total


@pytest.mark.smoke
def test_lane_sum_is_float32_rounded_once(x, y):
    x, y = x[:, :, :4], y[0]
    (got,) = exchange(0, (x, y))
    total = bf16(wide(y).sum(0))
    np.testing.assert_array_equal(wide(got), wide(x + total))
    assert bits_differ(summed_step_by_step(y), total) > 0.05
    assert bits_differ(bf16(wide(x) + wide(y).sum(0)), got) > 0.05


@pytest.mark.smoke
def test_delayed_sum_rounds_total_difference_and_own_in_turn(x, y):
    """The order that gives the reference's streams bit for bit: total, − own, + new own, + stream."""
    x = x[:, :, :4]
    past, now = y
    got = exchange(2, (x, past), (x, now))[1]
    total = bf16(wide(past).sum(0))
    np.testing.assert_array_equal(wide(got), wide(x + (now + (total - past))))
    assert bits_differ((x + now) + (total - past), got) > 0.05
    others = bf16(wide(past).sum(0) - wide(past))
    assert bits_differ(x + (now + others), got) > 0.05


@pytest.mark.smoke
def test_own_scale_is_a_float32_product_rounded_once(x, y):
    x, y = x[:, :, :4], y[0]
    scaled = bf16(wide(y) * np.float32(np.sqrt(LANES)))
    (early,) = exchange(0, (x, y), use_early_comm=False)
    (late,) = exchange(3, (x, y), use_comm=False)
    np.testing.assert_array_equal(wide(early), wide(x + scaled))
    np.testing.assert_array_equal(wide(late), wide(x + scaled))
    assert bits_differ(y * bf16(np.sqrt(LANES)), scaled) > 0.01


def test_fifteen_layers_of_bfloat16_stay_near_float32():
    """The same weights in float32: the error of the streams, layer by layer, sums across lanes and all."""
    config = LaneformerConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=15,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=64,
        sliding_window=8,
        swa_layers=(0, 2, 4),
    )
    half = Laneformer(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    full = Laneformer(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    nnx.update(full, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(full)))
    ids = np.random.default_rng(3).integers(0, 64, (2, 32)).astype(np.int32)
    _, got_NBSLD = half(ids, return_hidden=True)
    _, want_NBSLD = full(ids, return_hidden=True)
    assert got_NBSLD.dtype == jnp.bfloat16
    assert want_NBSLD.dtype == jnp.float32
    error_N = np.linalg.norm((wide(got_NBSLD) - wide(want_NBSLD)).reshape(15, -1), axis=1)
    error_N /= np.linalg.norm(wide(want_NBSLD).reshape(15, -1), axis=1)
    # Four units of bfloat16's last place at the end, and no more than twice what the first layer has:
    # rounding errors add up like steps of a random walk, they are not multiplied from layer to layer.
    assert error_N.max() < 4 * 2**-8
    assert error_N[-1] < 2 * error_N[0]
