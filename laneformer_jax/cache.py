"""Keys and values of the tokens seen so far.

Shapes: L lanes of this device, B batch, T slots, K kv heads of a lane, d head size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from laneformer_jax.config import LaneformerConfig


class KVCache(NamedTuple):
    """A decoding state: every layer's keys and values, written up to slot `length`.

    The caller keeps `length` within the slots; a write beyond them would land on the last ones.
    """

    keys: tuple[jax.Array, ...]  # N × [L,B,T,K,d]
    values: tuple[jax.Array, ...]
    valid_BT: jax.Array  # bool; False: an empty slot or padding
    length: jax.Array  # int32 scalar

    @classmethod
    def empty(
        cls, config: LaneformerConfig, batch: int, slots: int, dtype: jnp.dtype, local_lanes: int
    ) -> "KVCache":
        """A cache with room for `slots` tokens of `batch` sequences, for this device's lanes."""
        heads = config.num_key_value_heads // config.num_lanes
        shape = (local_lanes, batch, slots, heads, config.head_size)
        keys, values = (  # buffers of their own, so that all can be donated
            tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))
            for _ in range(2)
        )
        return cls(keys, values, jnp.zeros((batch, slots), bool), jnp.zeros((), jnp.int32))


def write(slots_LBTKd: jax.Array, new_LBSKd: jax.Array, at: jax.Array) -> jax.Array:
    """Put S new entries into slots at … at+S−1."""
    start = (0, 0, at, 0, 0)
    return jax.lax.dynamic_update_slice(slots_LBTKd, new_LBSKd.astype(slots_LBTKd.dtype), start)
