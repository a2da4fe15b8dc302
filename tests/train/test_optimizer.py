"""Schedules exact at their corners; decay and clipping where they belong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from laneformer_jax.checkpoint.native import abstract_params
from laneformer_jax.config import LaneformerConfig
from train.config import OptimizerConfig, ScheduleConfig
from train.optimizer import decays, make_optimizer, schedule


def rates(config: ScheduleConfig, peak: float, steps: int) -> np.ndarray:
    rate = schedule(config, peak, steps)
    return np.asarray([rate(jnp.asarray(i)) for i in range(steps)])


@pytest.mark.smoke
def test_wsd_is_exact_at_the_corners():
    got = rates(ScheduleConfig("wsd", warmup_steps=4, decay_steps=5, final=0.1), 0.5, 20)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[:4], np.float32([0.125, 0.25, 0.375, 0.5]))
    np.testing.assert_array_equal(got[4:15], np.float32(0.5))  # the last at the peak is number 15
    np.testing.assert_allclose(got[15:], 0.5 * np.array([0.82, 0.64, 0.46, 0.28, 0.1]), rtol=1e-6)


def test_without_corners_it_is_constant():
    np.testing.assert_array_equal(rates(ScheduleConfig(), 0.5, 3), np.float32([0.5, 0.5, 0.5]))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_from_the_warmup_to_the_last_step(kind):
    got = rates(ScheduleConfig(kind, warmup_steps=2, final=0.25), 1.0, 10)
    np.testing.assert_array_equal(got[:2], np.float32([0.5, 1.0]))
    assert np.all(np.diff(got[1:]) < 0)
    middle = {"cosine": 0.625, "linear": 0.625}[kind]  # halfway, t = 6
    np.testing.assert_allclose(got[[5, 9]], [middle, 0.25], rtol=1e-6)


def test_norms_and_embeddings_do_not_decay():
    config = LaneformerConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        qk_norm=True,
    )
    for replicated in (True, False):
        paths = abstract_params(_with(config, replicated_rmsn_scale=replicated))
        fixed = {p for p in paths if not decays(p)}
        name = "weight" if replicated else "scale"
        assert fixed == {
            "tok_embeddings.weight",
            f"norm.{name}",
            f"layers.0.attention_norm.{name}",
            f"layers.0.ffn_norm.{name}",
            "layers.0.attention.q_norm.weight",
            "layers.0.attention.k_norm.weight",
        }


def _with(config, **fields):
    import dataclasses

    return dataclasses.replace(config, **fields)


def test_first_update_by_hand():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, clip_norm=1.0, eps=1e-8)
    params = {"lm_head.weight": jnp.asarray([2.0, -2.0]), "norm.weight": jnp.asarray([1.0])}
    grads = {"lm_head.weight": jnp.asarray([3.0, 0.0]), "norm.weight": jnp.asarray([-4.0])}
    optimizer = make_optimizer(config, lambda _: jnp.float32(0.1), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    # Adam's first step is the sign of the gradient; decay is lr · 0.5 · w, on the head alone.
    np.testing.assert_allclose(new["lm_head.weight"], [2 - 0.1 - 0.1, -2 + 0.1], rtol=1e-6)
    np.testing.assert_allclose(new["norm.weight"], [1.1], rtol=1e-6)


def test_the_global_norm_is_clipped_before_adam_sees_it():
    config = OptimizerConfig(clip_norm=1.0)
    params = {"lm_head.weight": jnp.zeros(2)}
    optimizer = make_optimizer(config, lambda _: jnp.float32(0.1), params)
    _, state = optimizer.update(
        {"lm_head.weight": jnp.asarray([3.0, 4.0])}, optimizer.init(params), params
    )
    adam = next(s for s in state.inner if isinstance(s, optax.ScaleByAdamState))
    np.testing.assert_allclose(adam.mu["lm_head.weight"], 0.1 * np.array([0.6, 0.8]), rtol=1e-6)


def test_a_warmup_in_tokens_is_rounded_up_to_updates():
    got = ScheduleConfig(warmup_tokens=1001)
    rate = schedule(got, 1.0, 20, tokens=100)
    assert got.warmup(100) == 11
    np.testing.assert_allclose(
        [rate(jnp.asarray(9)), rate(jnp.asarray(10))], [10 / 11, 1], rtol=1e-6
    )
    with pytest.raises(ValueError, match="leave it out with warmup_steps 3"):
        ScheduleConfig(warmup_steps=3, warmup_tokens=5)


def test_muon_takes_each_lanes_matrix_and_adamw_the_rest():
    config = OptimizerConfig(name="muon", weight_decay=0.0, clip_norm=None)
    linear = "layers.0.attention.wq.weight"
    rng = np.random.default_rng(0)
    params = {linear: jnp.zeros((2, 4, 16)), "lm_head.weight": jnp.zeros((4, 4))}
    grads = {p: jnp.asarray(rng.normal(size=x.shape), jnp.float32) for p, x in params.items()}
    grads[linear] = grads[linear].at[1].multiply(1000)  # a lane's step does not depend on another's
    optimizer = make_optimizer(config, lambda _: jnp.float32(1.0), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(
        updates["lm_head.weight"], -np.sign(grads["lm_head.weight"]), rtol=1e-5
    )
    for lane in range(2):
        values = np.linalg.svd(updates[linear][lane], compute_uv=False)
        # Orthogonal to within what five Newton-Schulz steps give, at AdamW's size: 0.2 sqrt(16).
        np.testing.assert_allclose(values, 0.8, rtol=0.35)
    alone = make_optimizer(config, lambda _: jnp.float32(1.0), params)
    first = {**grads, linear: grads[linear].at[1].set(0)}
    other, _ = alone.update(first, alone.init(params), params)
    np.testing.assert_allclose(other[linear][0], updates[linear][0], rtol=1e-6)


@pytest.mark.smoke
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted():
    params = {"lm_head.weight": jnp.asarray([1.0, 2.0])}
    optimizer = make_optimizer(OptimizerConfig(ema=0.5), lambda _: jnp.float32(0.1), params)
    state = optimizer.init(params)
    good = {"lm_head.weight": jnp.asarray([1.0, -1.0])}
    updates, state = optimizer.update(good, state, params)
    params = optax.apply_updates(params, updates)
    before = state
    for row in (1, 2):
        bad = {"lm_head.weight": jnp.asarray([1.0, np.nan if row == 1 else np.inf])}
        updates, state = optimizer.update(bad, state, params)
        np.testing.assert_array_equal(updates["lm_head.weight"], [0, 0])
        assert (int(state.made), int(state.skipped), int(state.in_row)) == (1, row, row)
    assert_same = np.testing.assert_array_equal
    for name in ("inner", "typical", "average"):
        a, b = (jax.tree.leaves(getattr(s, name)) for s in (state, before))
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    _, state = optimizer.update(good, state, params)
    assert (int(state.made), int(state.skipped), int(state.in_row)) == (2, 2, 0)


def test_spikes_are_told_from_the_running_mean():
    params = {"lm_head.weight": jnp.zeros(1)}
    config = OptimizerConfig(skip_spikes=3.0)
    optimizer = make_optimizer(config, lambda _: jnp.float32(0.1), params)
    update = jax.jit(
        lambda norm, state: optimizer.update({"lm_head.weight": norm[None]}, state, params)[1]
    )
    state = optimizer.init(params)
    for _ in range(50):
        state = update(jnp.float32(2.0), state)
    np.testing.assert_allclose(state.typical, 2.0, rtol=1e-6)
    assert [int(update(jnp.float32(x), state).in_row) for x in (5.9, 6.1)] == [0, 1]
    assert int(update(jnp.float32(1e9), optimizer.init(params)).in_row) == 0  # too early to tell


def test_the_mean_of_the_parameters_follows_them():
    params = {"lm_head.weight": jnp.asarray([1.0])}
    config = OptimizerConfig(ema=0.75, weight_decay=0.0)
    optimizer = make_optimizer(config, lambda _: jnp.float32(0.1), params)
    grads = {"lm_head.weight": jnp.asarray([1.0])}
    _, state = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(state.average["lm_head.weight"], [0.75 + 0.25 * 0.9], rtol=1e-6)
