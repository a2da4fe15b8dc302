"""A whole model of random weights on one device, token after token, by each way of launching the kernels.

Shapes: V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax.cache import ring_slots
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.exchange import Lanes
from laneformer_jax.kernels import step
from laneformer_jax.kernels.cases import BF16, random, seconds
from laneformer_jax.kernels.step import Kernels
from laneformer_jax.model import Laneformer

# (params, head's rows [V,D], token, position, state) -> logits [V], next token, state
One = Callable[..., tuple[jax.Array, jax.Array, Any]]


def build(config: LaneformerConfig) -> tuple[Any, Any, jax.Array]:
    """Graph, parameters and the head's rows of a model in bfloat16."""
    model = Laneformer(config, rngs=nnx.Rngs(0), dtype=BF16)
    return *nnx.split(model), model.lm_head.weight[...]


def random_state(
    kernels: Kernels, config: LaneformerConfig, local_lanes: int, context: int
) -> step.State:
    """A cache with room for `context` positions, as full of noise."""
    slots = tuple(ring_slots(config, i, context, 1) for i in range(config.num_hidden_layers))
    empty = step.empty_state(kernels, config, slots, BF16, local_lanes)
    keys, values = (
        tuple(random(2 * i + n, *x.shape) for i, x in enumerate(rings))
        for n, rings in enumerate(empty[:2])
    )
    return empty._replace(keys=keys, values=values)


def by_kernels(kernels: Kernels, graph: Any, num_lanes: int) -> One:
    """A token's step. With the parameters of fewer lanes than `num_lanes`: what one of several devices
    does by itself, which is not a model."""
    lanes = Lanes(num_lanes)

    def one(params: Any, w_VD: Any, token: Any, position: Any, state: Any) -> Any:
        model = nnx.merge(graph, params)
        out, state = step.decode_step(kernels, model, lanes, w_VD, token, position, state)
        return out.logits_V, out.token, state

    return one


def seconds_per_token(
    one: One, params: Any, w_VD: jax.Array, context: int, state: Any, tokens: int, repeats: int
) -> float:
    """Median over runs of `tokens` tokens on the device, each from the one before; takes the state."""

    def run(params: Any, w_VD: Any, state: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            token, state = carry
            _, token, state = one(params, w_VD, token, jnp.int32(context) + i, state)
            return token, state

        return jax.lax.fori_loop(0, tokens, body, (jnp.int32(1), state))

    jitted, box = jax.jit(run, donate_argnums=2), [state]
    del state

    def call() -> jax.Array:
        token, box[0] = jitted(params, w_VD, box[0])
        return token

    return seconds(call, repeats) / tokens
