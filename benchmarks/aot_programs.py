"""The decode programs of the 2B model, compiled for H200s where there is none: what `aot_h200.py` counts.

A token step by itself, from a token to the next; and the decode engine's loop of a burst, with all that
the engine does around a step.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from decode import loop, sampling
from decode.request import Sampling
from decode.step import xla_step
from decode.weights import lay_out
from laneformer_jax import Laneformer, LaneformerConfig, compat
from laneformer_jax.cache import RingCache, ring_slots
from laneformer_jax.exchange import Lanes
from laneformer_jax.kernels import offline, step
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.tuning import shipped
from laneformer_jax.model import parameter_paths, parameter_specs
from laneformer_jax.sharding import AXES, LANE


def target_config() -> str | None:
    """XLA's own description of an H200, which lies as text inside its plugin; None without that."""
    spec = find_spec("jax_plugins.xla_cuda13") if find_spec("jax_plugins") else None
    if spec is None or not spec.submodule_search_locations:
        return None
    plugin = Path(spec.submodule_search_locations[0]) / "xla_cuda_plugin.so"
    data = plugin.read_bytes()
    at = data.index(b'device_description_str: "NVIDIA H200')
    text = data[data.rfind(b"\0", 0, at) + 1 : data.index(b"\0", at)].decode()
    return text[text.rfind("gpu_device_info {", 0, text.index("NVIDIA H200")) :]


def mesh_of(gpus: int) -> Mesh:
    """So many H200s, a lane on each of eight."""
    target = target_config()
    if target is None:
        raise SystemExit("aot_h200: needs the CUDA plugin: pip install 'laneformer-jax[cuda13]'")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{gpus}"
    )
    shape = [gpus if name == LANE else 1 for name in AXES]
    devices: Any = np.array(topology.devices).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compile_step(config: LaneformerConfig, kernels: str, gpus: int, context: int) -> Any:
    """All layers, head and greedy choice, as the engine asks XLA to compile them."""
    mesh = mesh_of(gpus)
    model = nnx.eval_shape(lambda: Laneformer(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graphdef, params = nnx.split(model)
    axis = LANE if gpus > 1 else None
    lanes = Lanes(config.num_lanes, axis)
    run = step.Kernels(Backend(), shipped("sm_90"), kernels)

    def token_step(params: Any, token: Any, position: Any, state: Any) -> Any:
        model = nnx.merge(graphdef, params)
        if kernels != "xla":
            w_VD = model.lm_head.weight[...]
            out, state = step.decode_step(run, model, lanes, w_VD, token, position, state)
            return out.token, state
        cache = RingCache(state[0], state[1], position[None])
        x_LBSD, cache = xla_step(model, lanes, token[None, None], cache)
        logits_v = model.logits(x_LBSD, lanes)[0, 0]  # of this device's rows
        best, row = jnp.max(logits_v), jnp.argmax(logits_v).astype(jnp.int32)
        if axis is None:
            return row, cache[:2]
        row = row + jax.lax.axis_index(axis) * len(logits_v)
        best_n, row_n = lanes.concatenate(jnp.stack([best, row.astype(jnp.float32)])[:, None])
        return row_n[jnp.argmax(best_n)].astype(jnp.int32), cache[:2]

    slots = tuple(ring_slots(config, i, context, 1) for i in range(config.num_hidden_layers))

    def empty_state() -> Any:
        if kernels != "xla":
            return step.empty_state(run, config, slots, jnp.bfloat16, config.num_lanes)
        return RingCache.empty(config, 1, context, 1, jnp.bfloat16, config.num_lanes)[:2]

    state = jax.eval_shape(empty_state)
    param_specs = parameter_specs(params, config)
    head = parameter_paths(param_specs)["lm_head.weight"]
    head.set_value(P(LANE))  # each device makes the logits of its rows
    by_lane = P(LANE) if axis else P()
    specs = (param_specs, P(), P(), jax.tree.map(lambda _: by_lane, state))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = placed(mesh, (params, number, number, state), specs)
    options = None
    if axis is not None:
        token_step = jax.shard_map(
            token_step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[-1])
        )
        options = compat.DELAYED_SUMS
    jitted = jax.jit(token_step, donate_argnums=3, compiler_options=options)
    return offline.lower(jitted, *arguments, target="sm_90").compile()


def compile_loop(config: LaneformerConfig, kernels: str, gpus: int, context: int) -> Any:
    """`decode.loop.burst` for one greedy row, with its device-side bookkeeping and its loop."""
    mesh, made = mesh_of(gpus), []

    def arrays_of_model() -> Any:
        model = Laneformer(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
        model.mesh = mesh
        layout, arrays = lay_out(model)
        made.append(layout)
        return arrays

    arrays = jax.eval_shape(arrays_of_model)
    layout = made[0]
    cache = jax.eval_shape(
        lambda: RingCache.empty(config, 1, context, 1, jnp.bfloat16, config.num_lanes)
    )
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    state = loop.State(cache, row, row, row, None, None)
    greedy = Sampling()
    knobs, stops = sampling.Knobs.of(greedy, layout.rows), np.zeros(4, np.int32)
    inputs = loop.Inputs(knobs, np.zeros(1, np.int32), stops, np.int32(1))
    plan = loop.Plan(sampling.Filters.of(greedy), steps=32, kernels=kernels)
    specs = (layout.specs, loop.state_specs(state), loop.input_specs(inputs), P())
    arguments = placed(mesh, (arrays, state, inputs, np.int32(32)), specs)
    burst = loop.burst_of(layout)
    return offline.lower(burst, layout, plan, *arguments, target="sm_90").compile()


def placed(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Shapes and dtypes of `tree`, on the mesh."""

    def one(x: Any, spec: Any) -> Any:
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, tree, specs)
