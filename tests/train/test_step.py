"""The update: the same on every mesh and in any microbatches, and its corner cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.sharding import make_mesh
from train.config import OptimizerConfig, ScheduleConfig
from train.optimizer import make_optimizer, schedule
from train.step import (
    Plan,
    gradients,
    init_params,
    init_state,
    make_eval_step,
    make_train_step,
    state_shardings,
)

CONFIG = LaneformerConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=64,
    sliding_window=5,
    swa_layers=(0, 2),
    use_early_comm=False,
)
ROWS, SEQ = 8, 16


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of two packed documents and some padding, with loss on part of the tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 64, (ROWS, SEQ + 1)).astype(np.int32)
    cuts = rng.integers(2, SEQ - 4, ROWS)
    index = np.arange(SEQ)[None].repeat(ROWS, 0)
    segments = np.where(index < cuts[:, None], 1, 2)
    segments[:, SEQ - 2 :] = 0
    positions = np.where(segments == 2, index - cuts[:, None], index)
    mask = (rng.random((ROWS, SEQ)) < 0.7) & (segments > 0)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": mask.astype(np.float32),
        "segment_ids": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
    }


def run_steps(plan: Plan, batch, steps: int = 3):
    rate = schedule(ScheduleConfig(warmup_steps=2), 1e-2, 100)
    params = init_params(plan, 0)
    optimizer = make_optimizer(OptimizerConfig(clip_norm=0.5), rate, params)
    shardings = state_shardings(plan, optimizer, params)
    step = make_train_step(plan, optimizer, rate, shardings)
    state = init_state(plan, optimizer, params, 0)
    placed = jax.device_put(batch, plan.batch_sharding())
    metrics = []
    for _ in range(steps):
        state, values = step(state, placed)
        metrics.append({k: float(v) for k, v in values.items()})
    assert int(state.step) == steps
    for path, value in state.params.items():
        assert value.sharding.is_equivalent_to(shardings.params[path], value.ndim)
    return metrics, jax.device_get(state.params)


def assert_close(a: dict, b: dict, relative: float) -> None:
    for path in a:
        scale = np.abs(b[path]).max()
        np.testing.assert_allclose(a[path], b[path], atol=relative * scale, rtol=0, err_msg=path)


HEADS = {
    "replicate": {},
    "vocab_parallel": {"lm_head_type": "vocab_parallel"},
    "lane": {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    "tied": {"tie_word_embeddings": True, "use_early_comm": True},
}


@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_those_of_one_device(head):
    config = dataclasses.replace(CONFIG, **HEADS[head])
    batch = make_batch()
    params = init_params(Plan(config), 0)
    loss, weight, grads = jax.jit(gradients, static_argnums=2)(params, batch, Plan(config))
    assert float(weight) == batch["loss_mask"].sum()
    for data, lane in ((2, 1), (1, 4), (1, 8), (2, 4)):
        plan = Plan(config, make_mesh(data, lane))
        spread = init_params(plan, 0)
        for path, value in spread.items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(params[path]), err_msg=path)
        placed = jax.device_put(batch, plan.batch_sharding())
        got = jax.jit(gradients, static_argnums=2)(spread, placed, plan)
        np.testing.assert_allclose(float(got[0]), float(loss), rtol=1e-5)
        assert float(got[1]) == float(weight)
        assert_close(jax.device_get(got[2]), jax.device_get(grads), 1e-5)


def test_updates_are_those_of_one_device():
    batch = make_batch()
    metrics, params = run_steps(Plan(CONFIG), batch)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    for data, lane in ((1, 8), (2, 4)):
        other, other_params = run_steps(Plan(CONFIG, make_mesh(data, lane)), batch)
        for a, b in zip(other, metrics, strict=True):
            for name in ("loss", "grad_norm", "lr", "weight"):
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)
        # Adam's first steps amplify round-off where a gradient is near zero.
        assert_close(other_params, params, 1e-3)


def test_a_global_norm_counts_lane_shards_once_and_replicated_tensors_once():
    batch = make_batch()
    plan = Plan(CONFIG, make_mesh(1, 8))
    metrics, _ = run_steps(plan, batch, steps=1)
    grads = jax.device_get(gradients(init_params(Plan(CONFIG), 0), batch, Plan(CONFIG))[2])
    by_hand = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))
    np.testing.assert_allclose(metrics[0]["grad_norm"], by_hand, rtol=1e-5)


@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_microbatches_of_1_and_many_valid_tokens_equal_one_big_batch(mesh):
    batch = make_batch()
    batch["loss_mask"][: ROWS // 2] = 0
    batch["loss_mask"][0, 3] = 1  # one valid token in the first half, many in the second
    mesh = None if mesh is None else make_mesh(*mesh)
    whole = gradients(init_params(Plan(CONFIG), 0), batch, Plan(CONFIG))
    plan = Plan(CONFIG, mesh, accumulate=2)
    placed = jax.device_put(batch, plan.batch_sharding())
    cut = jax.jit(gradients, static_argnums=2)(init_params(plan, 0), placed, plan)
    np.testing.assert_allclose(float(cut[0]), float(whole[0]), rtol=1e-6)
    assert float(cut[1]) == float(whole[1]) == batch["loss_mask"].sum()
    assert_close(jax.device_get(cut[2]), jax.device_get(whole[2]), 1e-5)


@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_a_batch_without_valid_tokens_has_loss_0_and_no_nan(mesh):
    batch = make_batch()
    batch["loss_mask"][:] = 0
    batch["segment_ids"][:] = 0
    mesh = None if mesh is None else make_mesh(*mesh)
    metrics, params = run_steps(Plan(CONFIG, mesh), batch, steps=2)
    assert metrics[0]["loss"] == metrics[0]["grad_norm"] == metrics[0]["weight"] == 0
    assert all(np.isfinite(value).all() for value in params.values())


def test_remat_changes_nothing():
    batch = make_batch()
    params = init_params(Plan(CONFIG), 0)
    plain = jax.jit(gradients, static_argnums=2)(params, batch, Plan(CONFIG))
    remat = jax.jit(gradients, static_argnums=2)(params, batch, Plan(CONFIG, remat=True))
    np.testing.assert_allclose(float(remat[0]), float(plain[0]), rtol=1e-6)
    assert_close(jax.device_get(remat[2]), jax.device_get(plain[2]), 1e-5)


def test_bfloat16_compute_keeps_float32_masters_and_learns():
    batch = make_batch()
    exact, _ = run_steps(Plan(CONFIG), batch, steps=8)
    metrics, params = run_steps(Plan(CONFIG, compute_dtype="bfloat16"), batch, steps=8)
    assert all(value.dtype == np.float32 for value in params.values())
    np.testing.assert_allclose(metrics[0]["loss"], exact[0]["loss"], rtol=2e-2)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.2


@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_evaluation_sums_over_the_whole_batch(mesh):
    batch = make_batch()
    mesh = None if mesh is None else make_mesh(*mesh)
    plan = Plan(CONFIG, mesh)
    params = init_params(plan, 0)
    total, weight = make_eval_step(plan)(params, jax.device_put(batch, plan.batch_sharding()))
    loss = gradients(init_params(Plan(CONFIG), 0), batch, Plan(CONFIG))[0]
    assert float(weight) == batch["loss_mask"].sum()
    np.testing.assert_allclose(float(total / weight), float(loss), rtol=1e-5)


def test_init_is_jnp_float32_everywhere():
    assert all(v.dtype == jnp.float32 for v in init_params(Plan(CONFIG), 3).values())
