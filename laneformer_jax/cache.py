"""Keys and values of the tokens seen so far.

Shapes: L lanes of this device, B batch, S new tokens, R slots of a ring, K kv heads of a lane,
G = L·B·K, d head size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from laneformer_jax import cache_blocks
from laneformer_jax.config import LaneformerConfig


class RingCache(NamedTuple):
    """Keys and values by position: position p of every row stands in slot p mod R of a layer's ring.

    A layer that sees everything has a slot for every position, so its ring never comes round. One that
    slides over W positions has W and as many as are written at once (`ring_slots`), so that a write
    never takes what its first query still sees. Positions below 0 are padding and are never seen.
    """

    # N × [G,R,d]: one leading axis, because where a matrix product must fold axes first XLA copies all of it.
    # Or N × `cache_blocks.Blocks`.
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    length_B: jax.Array  # int32, the next position; below 0 while padding goes in

    @classmethod
    def empty(
        cls,
        config: LaneformerConfig,
        batch: int,
        context: int,
        ahead: int,
        dtype: jnp.dtype,
        local_lanes: int,
        in_blocks: bool = False,
    ) -> "RingCache":
        """For `context` positions of `batch` rows, written at most `ahead` at once.

        in_blocks: each ring as `cache_blocks` has it, for CPUs.
        """
        heads = local_lanes * batch * (config.num_key_value_heads // config.num_lanes)
        slots = [ring_slots(config, i, context, ahead) for i in range(config.num_hidden_layers)]
        lengths = jnp.zeros((batch,), jnp.int32)
        if in_blocks:
            blocks = [cache_blocks.empty(heads, r, config.head_size, dtype) for r in slots]
            keys, values = zip(*blocks, strict=True)
            return cls(keys, values, lengths)

        def rings() -> tuple[jax.Array, ...]:  # buffers of their own, so that all can be donated
            return tuple(jnp.zeros((heads, r, config.head_size), dtype) for r in slots)

        return cls(rings(), rings(), lengths)


def ring_slots(config: LaneformerConfig, layer: int, context: int, ahead: int) -> int:
    """R of `layer`: `context`, or W + `ahead` where a sliding layer needs no more."""
    window = config.window(layer)
    return context if window is None else min(context, window + ahead)


def visible(position_BS: jax.Array, slots: int, window: int | None) -> jax.Array:
    """Which slots of a ring each query sees, bool [B,S,R], once its own token is written."""
    last_B1 = position_BS[:, -1:]
    held_BR = last_B1 - (last_B1 - jnp.arange(slots, dtype=jnp.int32)) % slots
    distance_BSR = position_BS[:, :, None] - held_BR[:, None, :]
    mask = (held_BR >= 0)[:, None] & (distance_BSR >= 0)
    return mask if window is None else mask & (distance_BSR < window)


def put(ring_GRd: jax.Array, new_LBSKd: jax.Array, position_BS: jax.Array) -> jax.Array:
    """Write S new entries at their positions, S at most R."""
    lanes, batch, seq, heads, d = new_LBSKd.shape
    new_GSd = new_LBSKd.swapaxes(2, 3).reshape(-1, seq, d).astype(ring_GRd.dtype)
    slot_BS = position_BS % ring_GRd.shape[1]
    if batch == seq == 1:
        return jax.lax.dynamic_update_slice(ring_GRd, new_GSd, (0, slot_BS[0, 0], 0))
    slots = ring_GRd.at[:, slot_BS[0]]
    if batch > 1:
        slot_GS = jnp.broadcast_to(slot_BS[None, :, None], (lanes, batch, heads, seq))
        slots = ring_GRd.at[jnp.arange(len(ring_GRd))[:, None], slot_GS.reshape(-1, seq)]
    return slots.set(new_GSd, mode="promise_in_bounds", unique_indices=True)
