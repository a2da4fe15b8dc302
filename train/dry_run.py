"""What a run would take, from shapes alone: memory, FLOPs, a bound on speed, days to the token budget.

The step is traced and compiled for a mesh of the asked size without one array being made: for that GPU
where XLA's CUDA compiler is installed (extra `cuda13`), which then tells what a step takes beside its
state. Elsewhere that is a formula, and says so: the CPU compiler's own figure is of no use, since it
undoes remat.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from laneformer_jax import costs
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.hardware import Device
from laneformer_jax.loss import LOGIT_BYTES
from laneformer_jax.sharding import DATA, FSDP, LANE, ROWS, check_mesh, make_mesh
from laneformer_jax.topology import absent_mesh, target_config
from train.config import MeshConfig, RunConfig, nearest_multiple
from train.optimizer import make_optimizer, schedule
from train.setup import find_start
from train.step import Plan, TrainState, make_train_step, state_shardings

_GB = 1e9


@dataclass(frozen=True)
class Report:
    """Figures of one run; bytes are of one device.

    Attributes:
        mesh: data, fsdp, lane.
        accumulate: microbatches of an update.
        state: bytes of parameters, gradients and optimizer state; exact.
        step: bytes that live during an update beside the state, by what they are; estimates.
        temporary: bytes that XLA's CUDA compiler sets aside for all of an update but parameters and
            optimizer state, gradients among them; None where it is not installed.
        flops_per_token: of forward and backward; nothing that is computed twice.
        tokens_per_step: of one update, over all devices.
        seconds: lower bounds of one update, by what would take them if all else were free.
        mfu_bound: model FLOP/s over vendor peak, if everything but the longest bound were hidden.
        days: to all tokens of the run at that bound.
        compile_s: of the step, here.
    """

    mesh: tuple[int, int, int]
    accumulate: int
    device: Device
    state: Mapping[str, int]
    step: Mapping[str, int]
    temporary: int | None
    flops_per_token: float
    tokens_per_step: int
    seconds: Mapping[str, float]
    mfu_bound: float
    days: float
    compile_s: float

    @property
    def bytes(self) -> int:
        if self.temporary is not None:
            return self.state["parameters"] + self.state["optimizer"] + self.temporary
        return sum(self.state.values()) + sum(self.step.values())


def choose_mesh(mesh: MeshConfig, devices: int) -> MeshConfig:
    """The run's mesh with as many copies (`data`) as the devices allow; FSDP over all of them where the
    run has no mesh. Raises UserError."""
    if mesh == MeshConfig():
        return MeshConfig(fsdp=devices)
    copy = mesh.fsdp * mesh.lane
    if devices % copy:
        raise UserError(
            f"mesh: fsdp {mesh.fsdp} × lane {mesh.lane} is {copy} devices, which must divide"
            f" --devices {devices}; name another, such as"
            f" 'mesh={{data: 1, fsdp: {devices}, lane: 1}}'"
        )
    return MeshConfig(devices // copy, mesh.fsdp, mesh.lane)


class Compiled(NamedTuple):
    """The update of a run, compiled from shapes.

    Attributes:
        config: the run, its mesh and microbatches those of the asked devices.
        state: shapes and places.
        executable: JAX's; for a GPU that is not here it can be looked at, not called.
        for_device: whether it is for the asked device, and not for this CPU.
        seconds: of tracing and compiling, here.
    """

    config: RunConfig
    plan: Plan
    state: TrainState[jax.ShapeDtypeStruct]
    executable: jax.stages.Compiled
    for_device: bool
    seconds: float


def compile_step(config: RunConfig, devices: int, device: Device) -> Compiled:
    """The update of `config` on so many devices. JAX must have as many, virtual ones will do; none where
    XLA's CUDA compiler knows the device.

    On fewer than its mesh has, as many more microbatches keep the rows of a device as they are.

    Raises:
        UserError: the mesh has another size, or rows cannot be shared among the devices.
    """
    sizes, model = config.train, _model(config)
    sides = choose_mesh(config.mesh, devices)
    accumulate = sizes.accumulate * max(1, config.mesh.data // sides.data)
    parts = accumulate * sides.data * sides.fsdp
    if sizes.batch_size % parts:
        raise UserError(
            f"train.batch_size = {sizes.batch_size}: must be divisible by accumulate {accumulate} ×"
            f" data {sides.data} × fsdp {sides.fsdp}; the nearest is"
            f" {nearest_multiple(sizes.batch_size, parts)}"
        )
    sizes = replace(sizes, accumulate=accumulate)
    config = replace(config, train=sizes, mesh=sides)
    target = target_config(device)
    if target is None:
        mesh = make_mesh(sides.data, sides.lane, fsdp=sides.fsdp)
    else:
        mesh = absent_mesh(target, (sides.data, sides.fsdp, sides.lane))
    check_mesh(mesh, model)
    # Compiled without offload, which the CPU cannot lower; the estimate knows of it.
    remat = "layer" if sizes.remat == "offload" and target is None else sizes.remat
    z_loss = config.optimizer.z_loss
    plan = Plan(model, mesh, sizes.compute_dtype, remat, sizes.accumulate, z_loss)
    params = plan.abstract_params()
    tokens = sizes.batch_size * sizes.seq_len
    rate = schedule(config.schedule, config.optimizer.learning_rate, sizes.steps, tokens)
    optimizer = make_optimizer(config.optimizer, rate, params)
    shardings = state_shardings(plan, optimizer, params)
    opt_state = jax.eval_shape(optimizer.init, params)
    rng = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        TrainState(params, opt_state, count, rng),
        shardings,
    )
    shape, where = (sizes.batch_size, sizes.seq_len), plan.batch_sharding()
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        for name, dtype in (
            ("tokens", jnp.int32),
            ("targets", jnp.int32),
            ("loss_mask", jnp.float32),
            ("segment_ids", jnp.int32),
            ("positions", jnp.int32),
        )
    }
    began = time.perf_counter()
    step = make_train_step(plan, optimizer, rate, shardings)
    lowered = step.lower(state, batch)  # type: ignore[attr-defined]
    # Nothing can be tried out on a GPU that is not here.
    executable = lowered.compile(None if target is None else {"xla_gpu_autotune_level": 0})
    seconds = time.perf_counter() - began
    return Compiled(config, plan, state, executable, target is not None, seconds)


def _model(config: RunConfig) -> LaneformerConfig:
    """The model of the config, or of what the run starts from. Raises UserError."""
    if config.model is not None:
        return config.model.build()
    try:
        start = find_start(config, None)
    except UserError as error:
        raise UserError(
            f"{error}; --dry-run reads the model's sizes there, or takes those of a preset:"
            " init_from=null model.preset=laneformer-2b"
        ) from None
    assert start is not None  # RunConfig requires one of the two
    return start.config


def dry_run(config: RunConfig, devices: int, device: Device) -> Report:
    """What `config` would take on so many devices; devices and errors as in `compile_step`."""
    compiled = compile_step(config, devices, device)
    config, plan, params = compiled.config, compiled.plan, compiled.state.params
    sizes, sides, temporary = config.train, config.mesh, None
    if compiled.for_device:
        memory = compiled.executable.memory_analysis()
        assert memory is not None
        temporary = memory.temp_size_in_bytes
    held, tokens = _bytes(params), sizes.batch_size * sizes.seq_len
    flops = costs.training_flops(plan.config, sizes.seq_len)
    seconds = _bounds(config, plan, params, device, flops * tokens)
    longest = max(seconds.values())
    return Report(
        mesh=(sides.data, sides.fsdp, sides.lane),
        accumulate=sizes.accumulate,
        device=device,
        state={
            "parameters": held,
            "gradients": held,
            "optimizer": _bytes(compiled.state.opt_state),
        },
        step=_live(config, plan, params),
        temporary=temporary,
        flops_per_token=flops,
        tokens_per_step=tokens,
        seconds=seconds,
        mfu_bound=flops * tokens / (devices * device.bf16_flops * longest),
        days=longest * sizes.steps / 86400,
        compile_s=compiled.seconds,
    )


def _bytes(tree: Any) -> int:
    """Of the parts that one device holds."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def _live(config: RunConfig, plan: Plan, params: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that live at the widest moment of an update, estimated.

    With R rows and S tokens of a device, its L lanes, and c bytes of the compute dtype: residual
    streams [L,R,S,D]·c kept per layer, the partials of δ layers on their way (two modules each), and
    one module's insides (all modules' without remat).
    """
    model, sizes, mesh = plan.config, config.train, plan.mesh
    assert mesh is not None
    width = jnp.dtype(plan.compute_dtype).itemsize
    lanes = model.num_lanes // mesh.shape[LANE]
    rows = sizes.batch_size // sizes.accumulate // (mesh.shape[DATA] * mesh.shape[FSDP])
    tokens = rows * sizes.seq_len
    n, d = model.num_hidden_layers, model.head_size
    part = lanes / model.num_lanes  # of the heads and neurons that are on this device
    stream = lanes * tokens * model.hidden_size * width
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    inside_attention = int(tokens * part * (heads + model.num_attention_heads) * d * width)
    inside_mlp = int(tokens * part * 3 * model.intermediate_size * width)
    kept = 2 * n * stream
    inside = max(inside_attention, inside_mlp)
    if sizes.remat == "none":
        inside = n * (inside_attention + inside_mlp)
    elif sizes.remat == "attention":
        kept += int(n * tokens * part * model.num_attention_heads * (d * width + 4))
    elif sizes.remat == "offload":
        kept = 2 * stream
    vocab = model.vocab_size // (
        mesh.shape[LANE] if model.vocab_size % mesh.shape[LANE] == 0 else 1
    )
    logits = 3 * min(LOGIT_BYTES, 4 * tokens * vocab)
    return {
        "streams kept for the backward pass": kept,
        "partials on their way": 2 * min(model.broadcast_delay, n) * stream,
        "insides of modules": inside + 3 * stream,
        "gathered weights": _gathered(plan, params),
        "logits": logits,
    }


def _gathered(plan: Plan, params: Mapping[str, Any]) -> int:
    """Weights in the compute dtype: the head and, with remat, two layers (one ahead), else all."""
    assert plan.mesh is not None
    width, lane = jnp.dtype(plan.compute_dtype).itemsize, plan.mesh.shape[LANE]
    layers = [p for p in params if p.startswith("layers.")]
    of_layers = sum(math.prod(params[p].shape) for p in layers) // lane
    rest = sum(math.prod(x.shape) for p, x in params.items() if p not in layers)
    share = 2 / plan.config.num_hidden_layers if plan.remat != "none" else 1
    return int(width * (min(share, 1) * of_layers + rest))


def _bounds(
    config: RunConfig, plan: Plan, params: Mapping[str, Any], device: Device, flops: float
) -> dict[str, float]:
    """Seconds of one update that each resource needs at the vendor's peak."""
    model, sizes, mesh = plan.config, config.train, plan.mesh
    assert mesh is not None
    devices = mesh.size
    data, fsdp, lane = (mesh.shape[axis] for axis in (DATA, FSDP, LANE))
    width = jnp.dtype(plan.compute_dtype).itemsize
    again = 1 / 3 if sizes.remat != "none" else 0  # one more forward pass
    local = sum(math.prod(x.shape) for x in params.values()) / lane
    gathers = (2 if sizes.remat != "none" else 1) * sizes.accumulate
    over_fsdp = (gathers * width + 4 * sizes.accumulate) * local * (fsdp - 1) / fsdp
    over_data = 2 * 4 * local / fsdp * (data - 1) / data
    tokens = sizes.batch_size * sizes.seq_len / math.prod(mesh.shape[axis] for axis in ROWS)
    sums = 2 * model.lane_sums() * tokens * model.hidden_size * 4
    over_lanes = 2 * sums * (lane - 1) / lane
    return {
        "products": flops * (1 + again) / (devices * device.bf16_flops),
        "links (FSDP, gradients, lanes)": (over_fsdp + over_data + over_lanes)
        / device.link_bandwidth,
        "optimizer, from memory": 7 * 4 * local / fsdp / device.memory_bandwidth,
    }


def text(report: Report) -> str:
    """The report in lines."""
    data, fsdp, lane = report.mesh
    free = report.device.memory - report.bytes
    lines = [
        f"mesh                    data {data} × fsdp {fsdp} × lane {lane}, {report.device.name}",
        "memory of one device",
    ]
    for name, value in report.state.items():
        lines.append(f"  {name:<38} {value / _GB:9.3f} GB")
    for name, value in report.step.items():
        lines.append(f"  {name:<38} {value / _GB:9.3f} GB  (estimate)")
    source = "estimate"
    if report.temporary is not None:
        source = "compiled"
        lines.append(
            f"  {'gradients and all of the step':<38} {report.temporary / _GB:9.3f} GB  (compiled for"
            f" {report.device.name})"
        )
    fits = "fits" if free >= 0 else "does not fit"
    lines += [
        f"  {'all':<38} {report.bytes / _GB:9.3f} GB  ({source}; {fits} in"
        f" {report.device.memory / _GB:.0f} GB)",
        f"FLOPs per token         {report.flops_per_token:.4g}",
        f"tokens per step         {report.tokens_per_step:,} in {report.accumulate} microbatches",
        "seconds per step, at least",
    ]
    lines += [f"  {name:<38} {value:9.4f}" for name, value in report.seconds.items()]
    lines += [
        f"MFU at most             {report.mfu_bound:.1%} of {report.device.bf16_flops / 1e12:g}"
        " TFLOP/s (dense bfloat16)",
        f"days to the last step   {report.days:.3g} at that bound",
        f"compiled in             {report.compile_s:.1f} s",
    ]
    return "\n".join(lines)
