"""The update: the same on every mesh and in any microbatches, and its corner cases.

Compiling is what these tests spend their time on: each plan's step is compiled once. Adam's first
moment after one update is (1 - b1) times the clipped gradient, so comparing it compares gradients.
"""

import dataclasses
import functools

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
    TrainState,
    gradients,
    init_params,
    init_state,
    make_eval_step,
    make_train_step,
    state_shardings,
)

CONFIG = LaneformerConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=64,
    sliding_window=5,
    swa_layers=(0,),
)
HEADS = {
    "replicate": {},
    "vocab_parallel": {"lm_head_type": "vocab_parallel", "use_early_comm": False},
    "lane": {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    "tied": {"tie_word_embeddings": True},
}
CONFIGS = {head: dataclasses.replace(CONFIG, **fields) for head, fields in HEADS.items()}
ROWS, SEQ = 8, 16
# An eps above every gradient makes Adam smooth, so that updates can be compared as closely as
# gradients are.
OPTIMIZER = OptimizerConfig(clip_norm=0.5, eps=1.0)


def make_batch() -> dict[str, np.ndarray]:
    """Rows of two packed documents and some padding, with loss on part of the tokens."""
    rng = np.random.default_rng(0)
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


def plan_of(head: str = "replicate", mesh: tuple[int, int, int] | None = None, **fields) -> Plan:
    """mesh: data, fsdp, lane."""
    made = None if mesh is None else make_mesh(mesh[0], mesh[2], fsdp=mesh[1])
    return Plan(CONFIGS[head], made, **fields)


RATE = schedule(ScheduleConfig(), 0.1, 100)


@functools.cache
def fresh_state(config: LaneformerConfig) -> TrainState:
    """The state before the first update, on the host."""
    plan = Plan(config)
    params = init_params(plan, 0)
    return jax.device_get(init_state(plan, make_optimizer(OPTIMIZER, RATE, params), params, 0))


@functools.cache
def compiled(plan: Plan):
    params = fresh_state(plan.config).params
    optimizer = make_optimizer(OPTIMIZER, RATE, params)
    shardings = state_shardings(plan, optimizer, params)
    return make_train_step(plan, optimizer, RATE, shardings), shardings


def update(plan: Plan, batch: dict[str, np.ndarray], steps: int = 1):
    """Metrics of each update, and the state after the last, on the host."""
    step, shardings = compiled(plan)
    state = jax.device_put(fresh_state(plan.config), shardings)
    placed = jax.device_put(batch, plan.batch_sharding())
    metrics = []
    for _ in range(steps):
        state, values = step(state, placed)
        metrics.append({k: float(v) for k, v in values.items()})
    assert int(state.step) == steps
    for path, value in state.params.items():
        assert value.sharding.is_equivalent_to(shardings.params[path], value.ndim), path
    return metrics, jax.device_get(state)


def moments(state) -> dict[str, np.ndarray]:
    """Adam's first moments; after one update 0.1 times the clipped gradient."""
    return next(s.mu for s in state.opt_state.inner if hasattr(s, "mu"))


def assert_close(a: dict, b: dict, relative: float) -> None:
    """Equal within `relative` of each tensor's largest value."""
    assert a.keys() == b.keys()
    for path in a:
        scale = np.abs(b[path]).max()
        np.testing.assert_allclose(a[path], b[path], atol=relative * scale, rtol=0, err_msg=path)


def assert_same_update(plan: Plan, batch: dict[str, np.ndarray], other: Plan) -> None:
    (got,), state = update(plan, batch)
    (want,), expected = update(other, batch)
    assert got["weight"] == want["weight"] == batch["loss_mask"].sum()
    for name in ("loss", "grad_norm", "lr"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
    assert_close(moments(state), moments(expected), 1e-5)
    assert_close(state.params, expected.params, 1e-5)


MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (4, 2, 1)]
QUICK = [("replicate", mesh) for mesh in ((1, 8, 1), (1, 1, 8), (2, 2, 2))]
QUICK += [("tied", (1, 2, 4)), ("vocab_parallel", (1, 8, 1))]


@pytest.mark.parametrize(
    ("head", "mesh"),
    [
        pytest.param(
            head,
            mesh,
            id=f"{head}-{'x'.join(map(str, mesh))}",
            marks=() if (head, mesh) in QUICK else pytest.mark.slow,
        )
        for head in HEADS
        for mesh in MESHES
    ],
)
def test_an_update_is_that_of_one_device(head, mesh):
    assert_same_update(plan_of(head, mesh), make_batch(), plan_of(head))


def test_the_update_is_adam_on_the_clipped_gradient_of_the_mean():
    """And its norm counts every element once; the meshes are compared with this."""
    plan, batch = plan_of(), make_batch()
    (loss, weight, _), grads = jax.device_get(
        jax.jit(gradients, static_argnums=2)(fresh_state(CONFIG).params, batch, plan)
    )
    (metrics,), state = update(plan, batch)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))
    assert norm > OPTIMIZER.clip_norm
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert metrics["weight"] == weight == batch["loss_mask"].sum()
    clipped = {path: g * (OPTIMIZER.clip_norm / norm) for path, g in grads.items()}
    assert_close(moments(state), {p: np.float32(0.1) * g for p, g in clipped.items()}, 1e-5)
    head = "lm_head.weight"
    before = fresh_state(CONFIG).params[head]
    step = clipped[head] / (np.abs(clipped[head]) + OPTIMIZER.eps) + 0.1 * before
    np.testing.assert_allclose(state.params[head], before - 0.1 * step, atol=1e-6)


def test_a_quieter_start_scales_what_writes_into_the_stream_and_nothing_else():
    plan = Plan(CONFIG)
    loud, quiet = init_params(plan, 0), init_params(plan, 0, 0.25)
    scaled = {p for p in loud if not np.array_equal(loud[p], quiet[p])}
    assert scaled == {
        p for p in loud if p.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
    }
    assert len(scaled) == 2 * CONFIG.num_hidden_layers
    for path in scaled:
        np.testing.assert_array_equal(np.asarray(quiet[path]), 0.25 * np.asarray(loud[path]))


def test_the_same_values_are_drawn_on_every_mesh():
    alone, spread = fresh_state(CONFIG).params, init_params(plan_of(mesh=(1, 2, 4)), 0)
    assert alone.keys() == spread.keys()
    for path, value in spread.items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(value), alone[path], err_msg=path)
    parts = {p: spread[p].addressable_shards[0].data.shape for p in spread}
    assert parts["layers.0.attention.wq.weight"] == (2, 2, 8)
    assert parts["layers.0.attention.wo.weight"] == (2, 8, 2)
    assert parts["tok_embeddings.weight"] == parts["lm_head.weight"] == (16, 8)


@pytest.mark.parametrize(
    "mesh", [None, pytest.param((1, 2, 2), marks=pytest.mark.slow)], ids=["one device", "1x2x2"]
)
def test_microbatches_of_1_and_many_valid_tokens_equal_one_big_batch(mesh):
    batch = make_batch()
    batch["loss_mask"][: ROWS // 2] = 0
    batch["loss_mask"][0, 3] = 1  # one valid token in the first half, all in the second
    batch["segment_ids"][ROWS // 2 :] = 1
    batch["loss_mask"][ROWS // 2 :] = 1
    assert batch["loss_mask"].sum() == 1 + ROWS // 2 * SEQ
    assert_same_update(plan_of(mesh=mesh, accumulate=2), batch, plan_of())


@pytest.mark.parametrize("mesh", [None, (1, 2, 4)], ids=["one device", "1x2x4"])
def test_a_batch_without_valid_tokens_has_loss_0_and_no_nan(mesh):
    batch = make_batch()
    batch["loss_mask"][:] = 0
    batch["segment_ids"][:] = 0
    plan = plan_of(mesh=mesh)
    metrics, state = update(plan, batch, steps=2)
    for values in metrics:
        assert values["loss"] == values["grad_norm"] == values["weight"] == 0
    start = fresh_state(CONFIG).params
    for path, value in state.params.items():
        # Two updates of decay at learning rate 0.1 and decay 0.1, or none.
        decayed = start[path] * (np.float32(0.99) ** 2)
        fixed = "norm" in path or "embeddings" in path
        np.testing.assert_allclose(
            value, start[path] if fixed else decayed, rtol=1e-5, err_msg=path
        )


@pytest.mark.parametrize(
    ("remat", "mesh"),
    [
        ("layer", None),
        ("attention", (2, 2, 2)),
        pytest.param("layer", (1, 8, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_remat_changes_nothing(remat, mesh):
    assert_same_update(plan_of(mesh=mesh, remat=remat), make_batch(), plan_of())


def test_bfloat16_compute_keeps_float32_masters_and_learns():
    batch = make_batch()
    exact, _ = update(plan_of(), batch, steps=12)
    metrics, state = update(plan_of(compute_dtype="bfloat16"), batch, steps=12)
    leaves = jax.tree.leaves((state.params, moments(state)))
    assert all(leaf.dtype == np.float32 for leaf in leaves)
    assert metrics[0]["loss"] != exact[0]["loss"]
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in exact], rtol=1e-2)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.02


@pytest.mark.parametrize("mesh", [None, (1, 2, 4)], ids=["one device", "1x2x4"])
def test_evaluation_sums_over_the_whole_batch(mesh):
    batch, plan = make_batch(), plan_of(mesh=mesh)
    placed = jax.device_put(batch, plan.batch_sharding())
    params = jax.device_put(fresh_state(CONFIG).params, compiled(plan)[1].params)
    total, weight = make_eval_step(plan)(params, placed)
    assert float(weight) == batch["loss_mask"].sum()
    (metrics,), _ = update(plan_of(), batch)
    np.testing.assert_allclose(float(total) / float(weight), metrics["loss"], rtol=1e-5)


# Packed documents -----------------------------------------------------------------------------

# A row of two documents whose edge lies within a window, through four layers that hear each other one
# layer late.
PACKED = dataclasses.replace(CONFIG, num_hidden_layers=4, broadcast_delay=1, swa_layers=(0, 1, 2))
FIRST, SECOND = 11, 9


def packed_batch(rows: list[list[int]], length: int) -> dict[str, np.ndarray]:
    """Rows of documents of so many tokens, each with its own tokens and weights, padded to `length`."""
    batch = {
        name: np.zeros((len(rows), length), kind)
        for name, kind in (
            ("tokens", np.int32),
            ("targets", np.int32),
            ("loss_mask", np.float32),
            ("segment_ids", np.int32),
            ("positions", np.int32),
        )
    }
    for r, documents in enumerate(rows):
        at = 0
        for number, size in enumerate(documents):
            rng = np.random.default_rng(size)
            part = np.s_[r, at : at + size]
            tokens = rng.integers(1, 64, size + 1)
            batch["tokens"][part], batch["targets"][part] = tokens[:-1], tokens[1:]
            batch["loss_mask"][part] = rng.random(size)
            batch["segment_ids"][part], batch["positions"][part] = number + 1, np.arange(size)
            at += size
    return batch


@pytest.mark.parametrize("path", [pytest.param("plain", marks=pytest.mark.slow), "chunked"])
def test_the_packed_gradient_is_the_weighted_sum_of_the_separate_ones(path, monkeypatch):
    from laneformer_jax import attention_paths

    monkeypatch.setattr(attention_paths, "PLAIN_UP_TO", 10**9 if path == "plain" else 0)
    small = functools.partial(attention_paths.chunked_attend, chunk=8)
    monkeypatch.setattr(attention_paths, "chunked_attend", small)
    plan, params = Plan(PACKED), init_params(Plan(PACKED), 0)
    run = jax.jit(lambda params, batch: gradients(params, batch, plan))
    together = run(params, packed_batch([[FIRST, SECOND]], FIRST + SECOND))
    apart = [run(params, packed_batch([[size]], FIRST)) for size in (FIRST, SECOND)]
    weights = [float(measured.weight) for measured, _ in apart]
    np.testing.assert_allclose(together[0].weight, sum(weights), rtol=1e-6)

    def mean(a, b):
        return (weights[0] * a + weights[1] * b) / sum(weights)

    np.testing.assert_allclose(
        together[0].loss, mean(apart[0][0].loss, apart[1][0].loss), rtol=1e-6
    )
    want = jax.device_get(jax.tree.map(mean, apart[0][1], apart[1][1]))
    assert_close(jax.device_get(together[1]), want, 1e-5)


@pytest.mark.slow
def test_microbatches_of_1_and_500_valid_tokens_equal_one_batch():
    batch = {name: x.repeat(32, axis=1) for name, x in make_batch().items()}
    batch["segment_ids"][:] = 1
    batch["positions"][:] = np.arange(SEQ * 32) % 64
    batch["loss_mask"][:] = 0
    batch["loss_mask"][0, 3] = 1
    batch["loss_mask"][ROWS - 1, :500] = 1
    params = fresh_state(CONFIG).params
    run = jax.jit(gradients, static_argnums=2)
    (loss, weight, _), grads = jax.device_get(run(params, batch, plan_of(accumulate=2)))
    (want_loss, want_weight, _), want = jax.device_get(run(params, batch, plan_of()))
    assert weight == want_weight == 501
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_close(grads, want, 1e-5)


# Whole runs on meshes ---------------------------------------------------------------------------

ALL = [None, (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]


def losses(mesh, config, steps):
    rng = np.random.default_rng(1)
    plan = plan_of(mesh=mesh)
    params = init_params(plan, 0)
    rate = schedule(ScheduleConfig(warmup_steps=5), 3e-3, steps)
    optimizer = make_optimizer(config, rate, params)
    step = make_train_step(plan, optimizer, rate, state_shardings(plan, optimizer, params))
    state = init_state(plan, optimizer, params, 0)
    found = []
    for _ in range(steps):
        batch = make_batch()
        batch["tokens"] = rng.integers(0, 8, batch["tokens"].shape).astype(np.int32)
        batch["targets"] = (batch["tokens"] + 1) % 8
        state, metrics = step(state, jax.device_put(batch, plan.batch_sharding()))
        found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.slow
def test_fifty_steps_are_the_same_on_every_mesh():
    want = losses(None, OptimizerConfig(), 50)
    assert want[-1] < 0.7 * want[0]
    for mesh in ALL[1:]:
        np.testing.assert_allclose(
            losses(mesh, OptimizerConfig(), 50), want, rtol=1e-5, err_msg=mesh
        )


def first_update(mesh, config):
    """What the first update adds to each parameter."""
    plan = plan_of(mesh=mesh)
    params = fresh_state(CONFIG).params
    optimizer = make_optimizer(config, RATE, params)
    shardings = state_shardings(plan, optimizer, params)
    state = init_state(plan, optimizer, jax.device_put(params, shardings.params), 0)
    step = make_train_step(plan, optimizer, RATE, shardings)
    state, _ = step(state, jax.device_put(make_batch(), plan.batch_sharding()))
    return {path: value - params[path] for path, value in jax.device_get(state.params).items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ALL[1:], ids=str)
def test_muons_first_update_is_the_same_on_every_mesh(mesh):
    muon = OptimizerConfig(name="muon", eps=1.0)
    want = first_update(None, muon)
    matrix = want["layers.0.attention.wq.weight"]
    assert (
        np.abs(matrix).max() > 0.5 * 0.1 * 0.2
    )  # about learning rate times an AdamW update's size
    assert_close(first_update(mesh, muon), want, 1e-5)


def test_a_state_saved_on_one_mesh_goes_on_on_another(tmp_path):
    """Parameters and moments bit for bit, the next loss but for rounding."""
    from laneformer_jax.checkpoint.training import TrainingCheckpoints

    batch = make_batch()
    plan = plan_of(mesh=(2, 2, 2))
    step, shardings = compiled(plan)
    state = jax.device_put(fresh_state(CONFIG), shardings)
    state, _ = step(state, jax.device_put(batch, plan.batch_sharding()))
    saved = jax.device_get(state)
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(1, state.params, {"opt_state": state.opt_state}, CONFIG, {})
    # The next update takes over the memory of what is being written.
    step(state, jax.device_put(batch, plan.batch_sharding()))
    assert state.params["lm_head.weight"].is_deleted()
    checkpoints.wait()
    (want,), _ = update(plan_of(), batch)
    after = {}
    for mesh in (None, (1, 4, 2)):
        plan = plan_of(mesh=mesh)
        shapes = plan.abstract_params()
        optimizer = make_optimizer(OPTIMIZER, RATE, shapes)
        where = state_shardings(plan, optimizer, shapes)
        opt_shapes = jax.eval_shape(optimizer.init, shapes)
        opt_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            opt_shapes,
            where.opt_state,
        )
        restored = checkpoints.restore(tmp_path / "1", shapes, {"opt_state": opt_state})
        for path, value in restored.params.items():
            np.testing.assert_array_equal(np.asarray(value), saved.params[path], err_msg=path)
            assert value.sharding.is_equivalent_to(where.params[path], value.ndim)
        for got, was in zip(
            jax.tree.leaves(restored.optimizer["opt_state"]),
            jax.tree.leaves(saved.opt_state),
            strict=True,
        ):
            np.testing.assert_array_equal(np.asarray(got), was)
        placed = jax.device_put(batch, plan.batch_sharding())
        total, weight = make_eval_step(plan)(restored.params, placed)
        after[mesh] = float(total) / float(weight)
    checkpoints.close()
    assert after[None] < want["loss"]
    np.testing.assert_allclose(after[1, 4, 2], after[None], rtol=1e-6)
