"""One optimizer update, and one evaluation, as jitted functions over a mesh or a single device.

Shapes: B rows, S tokens of a row; A microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from laneformer_jax.checkpoint.native import model_of
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.exchange import Lanes
from laneformer_jax.loss import token_losses, weighted_sum
from laneformer_jax.model import Laneformer, parameter_paths
from laneformer_jax.sharding import DATA, LANE, named, parameter_spec

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

    mesh: spread rows over its data axis and lanes over its lane axis; None: one device.
    """

    config: LaneformerConfig
    mesh: Mesh | None = None
    compute_dtype: str = "float32"
    remat: bool = False
    accumulate: int = 1

    def specs(self, params: Mapping[str, Any]) -> dict[str, P]:
        return {path: parameter_spec(path, self.config) for path in params}

    def sharding(self, spec: P) -> jax.sharding.Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return named(self.mesh, spec)

    def batch_sharding(self) -> jax.sharding.Sharding:
        return self.sharding(P(DATA))


def loss_sum(params: Params, batch: Batch, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Sum of weighted token losses and sum of weights over these rows, float32 scalars.

    Runs on one device, or inside a shard_map on this device's lanes and rows.
    """
    config = plan.config
    params = {path: value.astype(plan.compute_dtype) for path, value in params.items()}
    model = model_of(config, params, None)
    lanes = Lanes(config.num_lanes, None if plan.mesh is None else LANE)
    out = model.trunk(
        batch["tokens"],
        lanes,
        positions_BS=batch["positions"],
        segment_ids_BS=batch["segment_ids"],
        remat=plan.remat,
    )
    logits_BSV = model.logits(out.x_LBSD, lanes)
    vocab_axis = lanes.axis if config.lm_head_type == "vocab_parallel" else None
    losses_BS = token_losses(logits_BSV, batch["targets"], vocab_axis)
    return weighted_sum(losses_BS, batch["loss_mask"])


def gradients(params: Params, batch: Batch, plan: Plan) -> tuple[jax.Array, jax.Array, Params]:
    """Mean loss, sum of weights, and the gradient of the mean, over the whole batch.

    Every token counts the same, in whichever microbatch or on whichever device it is. Without any
    weight loss and gradient are 0.
    """
    if plan.mesh is None:
        loss, weight, grads = _local_gradients(params, batch, plan)
    else:
        specs = plan.specs(params)
        loss, weight, grads = jax.shard_map(
            partial(_local_gradients, plan=plan),
            mesh=plan.mesh,
            in_specs=(specs, P(DATA)),
            out_specs=(P(), P(), specs),
        )(params, batch)
    scale = 1 / jnp.where(weight > 0, weight, 1)
    return loss * scale, weight, jax.tree.map(lambda g: g * scale, grads)


def _local_gradients(
    params: Params, batch: Batch, plan: Plan
) -> tuple[jax.Array, jax.Array, Params]:
    """Sums over all rows, microbatch by microbatch; over the data axis only once, at the end."""
    axes = () if plan.mesh is None else (DATA,)
    if axes:
        params = jax.lax.pcast(params, axes, to="varying")
    grad = jax.value_and_grad(partial(loss_sum, plan=plan), has_aux=True)

    def add(total: Any, micro: Batch) -> tuple[Any, None]:
        (loss, weight), grads = grad(params, micro)
        return jax.tree.map(jnp.add, total, (loss, weight, grads)), None

    if plan.accumulate == 1:
        (loss, weight), grads = grad(params, batch)
        total = (loss, weight, grads)
    else:
        micros = jax.tree.map(lambda x: x.reshape(plan.accumulate, -1, *x.shape[1:]), batch)
        first, rest = jax.tree.map(lambda x: x[0], micros), jax.tree.map(lambda x: x[1:], micros)
        (loss, weight), grads = grad(params, first)
        total, _ = jax.lax.scan(add, (loss, weight, grads), rest)
    return jax.lax.psum(total, axes) if axes else total


def make_train_step(
    plan: Plan,
    optimizer: optax.GradientTransformation,
    rate: Callable[[jax.Array], jax.Array],
    shardings: TrainState[jax.sharding.Sharding],
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """A jitted update that takes over its state's memory.

    Returns metrics of the batch before the update: `loss` (mean over weights, nats), `grad_norm`
    (before clipping), `lr`, `weight` (sum of loss weights).
    """

    def update(state: State, batch: Batch) -> tuple[State, Metrics]:
        loss, weight, grads = gradients(state.params, batch, plan)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "lr": rate(state.step),
            "weight": weight,
        }
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, plan.sharding(P())))


def make_eval_step(plan: Plan) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """A jitted sum of weighted losses and of weights over a batch."""

    def local(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        sums = loss_sum(params, batch, plan)
        return sums if plan.mesh is None else jax.lax.psum(sums, DATA)

    def evaluate(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if plan.mesh is None:
            return local(params, batch)
        return jax.shard_map(
            local, mesh=plan.mesh, in_specs=(plan.specs(params), P(DATA)), out_specs=P()
        )(params, batch)

    return jax.jit(evaluate)


def init_params(plan: Plan, seed: int) -> Params:
    """Fresh float32 parameters on their devices; the same values on every mesh."""

    def init() -> Params:
        model = Laneformer(plan.config, rngs=nnx.Rngs(seed))
        return {p: v[...] for p, v in parameter_paths(nnx.state(model)).items()}

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
