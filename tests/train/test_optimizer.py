"""Schedules exact at their corners; decay and clipping where they belong."""

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
