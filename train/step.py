"""One optimizer update, and one evaluation, as jitted functions over a mesh or a single device.

Shapes: B rows, S tokens of a row; A microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from laneformer_jax import compat
from laneformer_jax.checkpoint.hf import abstract_model
from laneformer_jax.checkpoint.native import abstract_params, grouped, model_of
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.exchange import Lanes
from laneformer_jax.loss import head_loss
from laneformer_jax.model import Laneformer, parameter_paths
from laneformer_jax.remat import Remat
from laneformer_jax.sharding import LANE, ROWS, named, rule_of, training_spec

Params = dict[str, jax.Array]  # by dotted path
Batch = Mapping[str, jax.Array]  # tokens, targets, loss_mask, segment_ids, positions [B,S]
Metrics = dict[str, jax.Array]
T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState(Generic[T]):
    """What an update changes: float32 parameters, optimizer state, updates made, RNG key.

    T: jax.Array, or what is known of each array, such as its sharding.
    """

    params: dict[str, T]
    opt_state: Any
    step: T  # int32
    rng: T  # uint32, the data of a key


State = TrainState[jax.Array]


@dataclass(frozen=True)
class Plan:
    """What a step is made of beside its optimizer.

    mesh: spread rows over its data and fsdp axes, lanes over its lane axis, and parameters, gradients
    and optimizer state over fsdp and lane; None: one device.
    """

    config: LaneformerConfig
    mesh: Mesh | None = None
    compute_dtype: str = "float32"
    remat: Remat = "none"
    accumulate: int = 1
    z_loss: float = 0.0

    def specs(self, params: Mapping[str, Any]) -> dict[str, P]:
        """How each parameter (dotted path -> anything with a global shape) rests."""
        if self.mesh is None:
            return {path: P() for path in params}
        mesh = self.mesh
        return {p: training_spec(p, x.shape, self.config, mesh) for p, x in params.items()}

    def sharding(self, spec: P) -> jax.sharding.Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return named(self.mesh, spec)

    def batch_sharding(self) -> jax.sharding.Sharding:
        return self.sharding(P(ROWS))

    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and resting place of every parameter, without any array."""
        shapes = abstract_params(self.config, jnp.float32)
        specs = self.specs(shapes)
        return {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(specs[path]))
            for path, x in shapes.items()
        }


class Measured(NamedTuple, Generic[T]):
    """What a batch gives beside gradients. Float32.

    Attributes:
        loss: of its tokens, z-loss aside; a sum where it says so, else a mean over weights.
        weight: sum of loss weights.
        drift_N: how far lanes have drifted apart after each layer (`exchange.drift`).
    """

    loss: T
    weight: T
    drift_N: T


def loss_sum(
    params: Params, batch: Batch, plan: Plan, specs: Mapping[str, P], measure: bool = True
) -> tuple[jax.Array, Measured[jax.Array]]:
    """What training minimises, summed over these rows, and what it measured, `loss` a sum too.

    Runs on one device, or inside a shard_map on this device's lanes and rows and its parts of the
    parameters, which `specs` tells. measure: also the lanes' drift, else zeros.
    """
    config = plan.config
    dtype = jnp.dtype(plan.compute_dtype)

    def fetch(path: str, weight: jax.Array) -> jax.Array:
        gathered = rule_of(path, config).gather
        axes = tuple((i, axis) for i, axis in enumerate(specs[path]) if axis in gathered)
        return _gather(weight, axes, dtype) if axes else weight.astype(dtype)

    params = {p: x if p.startswith("layers.") else fetch(p, x) for p, x in params.items()}
    model = model_of(config, params, None)
    lanes = Lanes(config.num_lanes, None if plan.mesh is None else LANE)
    out = model.trunk(
        batch["tokens"],
        lanes,
        positions_BS=batch["positions"],
        segment_ids_BS=batch["segment_ids"],
        remat=plan.remat,
        fetch=fetch,
        return_drift=measure,
    )
    x = model.final(out.x_LBSD, lanes)
    weights, vocab, vocab_axis = _head_weights(params, plan, specs)
    if vocab_axis is not None:
        x = lanes.enter(x)
    objective, loss = head_loss(
        partial(_head, config, lanes),
        weights,
        x,
        batch["targets"],
        batch["loss_mask"],
        vocab=vocab,
        vocab_axis=vocab_axis,
        z_loss=plan.z_loss,
    )
    weight = jnp.sum(batch["loss_mask"].astype(jnp.float32))
    drift = jnp.zeros(config.num_hidden_layers) if out.drift_N is None else out.drift_N
    return objective, Measured(loss, weight, drift)


def _head_weights(
    params: Params, plan: Plan, specs: Mapping[str, P]
) -> tuple[Params, int, str | None]:
    """What makes the logits on this device, their number, and the axis that splits the vocabulary."""
    config, mesh = plan.config, plan.mesh
    parts = 1 if mesh is None else mesh.shape[LANE]
    if config.tie_word_embeddings:
        path = "tok_embeddings.weight"
        weight = params[path]
        if LANE not in specs[path]:
            return {path: weight}, config.vocab_size, None
        size = config.vocab_size // parts
        start = jax.lax.axis_index(LANE) * size
        rows = jax.lax.dynamic_slice_in_dim(weight, start, size)
        return {path: rows}, size, LANE
    weights = {path: x for path, x in params.items() if path.startswith("lm_head.")}
    (path,) = weights
    split = config.lm_head_type != "lane" and LANE in specs[path]
    if config.lm_head_type == "vocab_parallel" and mesh is not None:
        split = True  # over one device too: what its lanes make is not known to be equal elsewhere
    return weights, config.vocab_size // (parts if split else 1), LANE if split else None


def _head(config: LaneformerConfig, lanes: Lanes, weights: Params, x: jax.Array) -> jax.Array:
    model = abstract_model(config)
    part = nnx.state(model)
    for path, variable in parameter_paths(part).items():
        if path in weights:
            variable.set_value(weights[path])
    nnx.update(model, part)
    return model.head(x, lanes)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(weight: jax.Array, axes: tuple[tuple[int, str], ...], dtype: Any) -> jax.Array:
    """This device's part of a float32 parameter -> the whole in the compute dtype.

    axes: dimensions and the mesh axes that split them. What travels is in the compute dtype; the
    gradient is summed and scattered in float32.
    """
    weight = weight.astype(dtype)
    for dimension, axis in axes:
        weight = jax.lax.all_gather(weight, axis, axis=dimension, tiled=True)
    return weight


def _gather_forward(weight: jax.Array, axes: Any, dtype: Any) -> tuple[jax.Array, None]:
    return _gather(weight, axes, dtype), None


def _scatter(axes: Any, dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = gradient.astype(jnp.float32)
    for dimension, axis in reversed(axes):
        gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dimension, tiled=True)
    return (gradient,)


_gather.defvjp(_gather_forward, _scatter)


def gradients(params: Params, batch: Batch, plan: Plan) -> tuple[Measured[jax.Array], Params]:
    """What the whole batch measures, and the gradient of its mean objective.

    Every token counts the same, in whichever microbatch or on whichever device it is. Without any
    weight loss and gradient are 0.
    """
    specs = plan.specs(params)
    if plan.mesh is None:
        measured, grads = _local_gradients(params, batch, plan, specs)
    else:
        measured, grads = jax.shard_map(
            partial(_local_gradients, plan=plan, specs=specs),
            mesh=plan.mesh,
            in_specs=(specs, P(ROWS)),
            out_specs=(Measured(P(), P(), P()), specs),
        )(params, batch)
    weight = measured.weight
    scale = 1 / jnp.where(weight > 0, weight, 1)
    return measured._replace(loss=measured.loss * scale), jax.tree.map(lambda g: g * scale, grads)


def _local_gradients(
    params: Params, batch: Batch, plan: Plan, specs: Mapping[str, P]
) -> tuple[Measured[jax.Array], Params]:
    """Sums over all rows, microbatch by microbatch; over devices that repeat a tensor only once, at
    the end."""
    spread = plan.mesh is not None
    if spread:
        params = {p: _differing(x, specs[p]) for p, x in params.items()}
    grad = jax.value_and_grad(partial(loss_sum, plan=plan, specs=specs), has_aux=True)

    def of(micro: Batch) -> tuple[Measured[jax.Array], Params]:
        (_, measured), grads = grad(params, micro)
        return measured, grads

    def add(total: Any, micro: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of(micro)), None

    if plan.accumulate == 1:
        measured, grads = of(batch)
    else:
        micros = jax.tree.map(lambda x: x.reshape(plan.accumulate, -1, *x.shape[1:]), batch)
        nothing = Measured(jnp.zeros(()), jnp.zeros(()), jnp.zeros(plan.config.num_hidden_layers))
        if spread:
            nothing = jax.lax.pcast(nothing, ROWS, to="varying")
        start = (nothing, jax.tree.map(jnp.zeros_like, params))
        (measured, grads), _ = jax.lax.scan(add, start, micros)
        measured = measured._replace(drift_N=measured.drift_N / plan.accumulate)
    if spread:
        loss, weight = jax.lax.psum((measured.loss, measured.weight), ROWS)
        measured = Measured(loss, weight, jax.lax.pmean(measured.drift_N, ROWS))
        grads = {p: jax.lax.psum(g, _repeating(specs[p])) for p, g in grads.items()}
    return measured, grads


def _repeating(spec: P) -> tuple[str, ...]:
    """The axes over which rows, but not the tensor, are spread."""
    return tuple(axis for axis in ROWS if axis not in spec)


def _differing(x: jax.Array, spec: P) -> jax.Array:
    return jax.lax.pcast(x, _repeating(spec), to="varying")


def make_train_step(
    plan: Plan,
    optimizer: optax.GradientTransformation,
    rate: Callable[[jax.Array], jax.Array],
    shardings: TrainState[jax.sharding.Sharding],
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """A jitted update that takes over its state's memory.

    Returns metrics of the batch before the update: `loss` (mean over weights, nats), `grad_norm`
    (before clipping), `lr`, `weight` (sum of loss weights), `skipped` (updates so far, this one
    included), `skipped_in_row`, and `layer_metrics`.
    """

    def update(state: State, batch: Batch) -> tuple[State, Metrics]:
        measured, grads = gradients(state.params, batch, plan)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        made = state.step - state.opt_state.skipped
        metrics = {
            "loss": measured.loss,
            "grad_norm": optax.tree.norm(grads),
            "lr": rate(made),
            "skipped": opt_state.skipped,
            "skipped_in_row": opt_state.in_row,
            "weight": measured.weight,
            **layer_metrics(grads, measured.drift_N),
        }
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return jax.jit(
        update,
        donate_argnums=0,
        out_shardings=(shardings, plan.sharding(P())),
        compiler_options=_compiler_options(plan),
    )


_JOIN_SUMS_UP_TO = 2**20  # bytes; norms' sums travel together, streams' each when it is ready


def _compiler_options(plan: Plan) -> dict[str, Any] | None:
    device = jax.local_devices()[0] if plan.mesh is None else plan.mesh.devices.flat[0]
    if device.platform == "cpu":
        # In bfloat16 they would take minutes to compile.
        return dict(compat.CPU_PRODUCTS) if plan.compute_dtype == "float32" else None
    if plan.mesh is None or plan.mesh.shape[LANE] == 1:
        return None
    joined = {"xla_gpu_all_reduce_combine_threshold_bytes": _JOIN_SUMS_UP_TO}
    return {**compat.DELAYED_SUMS, **joined}


def layer_metrics(grads: Params, drift_N: jax.Array) -> Metrics:
    """`grad_norm/layer_NN` (also embedding, head) and `lane_drift/layer_NN`."""
    groups = {group: optax.tree.norm(part) for group, part in grouped(grads).items()}
    norms = {f"grad_norm/{group}": norm for group, norm in groups.items()}
    drifts = {f"lane_drift/layer_{i:03d}": drift_N[i] for i in range(len(drift_N))}
    return norms | drifts


def make_eval_step(plan: Plan) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """A jitted sum of weighted losses and of weights over a batch."""

    def local(params: Params, batch: Batch, specs: Mapping[str, P]) -> Any:
        if plan.mesh is not None:
            params = {p: _differing(x, specs[p]) for p, x in params.items()}
        _, measured = loss_sum(params, batch, plan, specs, measure=False)
        sums = (measured.loss, measured.weight)
        return sums if plan.mesh is None else jax.lax.psum(sums, ROWS)

    def evaluate(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        specs = plan.specs(params)
        if plan.mesh is None:
            return local(params, batch, specs)
        return jax.shard_map(
            partial(local, specs=specs), mesh=plan.mesh, in_specs=(specs, P(ROWS)), out_specs=P()
        )(params, batch)

    return jax.jit(evaluate, compiler_options=_compiler_options(plan))


_WRITES_RESIDUAL = ("attention.wo.weight", "feed_forward.w2.weight")


def init_params(plan: Plan, seed: int, residual_scale: float = 1.0) -> Params:
    """Fresh float32 parameters on their devices; the same values on every mesh.

    residual_scale: factor on the weights that write into the residual stream.
    """

    def init() -> Params:
        model = Laneformer(plan.config, rngs=nnx.Rngs(seed))
        params = {p: v[...] for p, v in parameter_paths(nnx.state(model)).items()}
        if residual_scale == 1:
            return params
        return {
            p: residual_scale * v if p.endswith(_WRITES_RESIDUAL) else v for p, v in params.items()
        }

    shapes = jax.eval_shape(init)
    shardings = {path: plan.sharding(spec) for path, spec in plan.specs(shapes).items()}
    return jax.jit(init, out_shardings=shardings)()


def state_shardings(
    plan: Plan, optimizer: optax.GradientTransformation, params: Mapping[str, Any]
) -> TrainState[jax.sharding.Sharding]:
    """The sharding of every array of a state: optimizer moments lie where their parameters do."""
    specs = plan.specs(params)

    def of(path: Any, leaf: Any) -> jax.sharding.Sharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        like = next((name for name in names if name in specs), None)
        same_shape = like is not None and leaf.shape == params[like].shape
        return plan.sharding(specs[like] if like is not None and same_shape else P())

    opt_state = jax.eval_shape(optimizer.init, dict(params))
    replicated: Any = plan.sharding(P())  # shardings stand where a state has arrays
    of_params: Any = {path: plan.sharding(spec) for path, spec in specs.items()}
    return TrainState(
        of_params,
        jax.tree_util.tree_map_with_path(of, opt_state),
        replicated,
        replicated,
    )


def init_state(
    plan: Plan, optimizer: optax.GradientTransformation, params: Params, seed: int
) -> State:
    """A state before the first update, around parameters that are already in place."""
    shardings = state_shardings(plan, optimizer, params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    rng = jax.random.key_data(jax.random.key(seed))
    step, rng = jax.device_put((jnp.zeros((), jnp.int32), rng), plan.sharding(P()))
    return TrainState(params, opt_state, step, rng)
