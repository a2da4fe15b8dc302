"""Tokens through the layers against the cache: the modules and the exchange are the model's own.

Shapes: L lanes of this device, B batch, S tokens at once, D hidden, K kv heads of a lane, d head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax import cache as ring
from laneformer_jax import cache_blocks, rope
from laneformer_jax.attention import attend_ring
from laneformer_jax.cache import RingCache
from laneformer_jax.config import ATTENTION, MLP
from laneformer_jax.exchange import LaneExchange, Lanes
from laneformer_jax.model import Laneformer


def xla_step(
    model: Laneformer, lanes: Lanes, ids_BS: jax.Array, cache: RingCache
) -> tuple[jax.Array, RingCache]:
    """The step in plain JAX: at most as many tokens as the cache was made to take at once."""
    cfg = model.config
    seq = ids_BS.shape[1]
    position_BS = cache.length_B[:, None] + jnp.arange(seq, dtype=jnp.int32)
    cos_BSh, sin_BSh = rope.angles(position_BS, cfg)
    # In order, not a set, whose order differs between processes: then so does the compiled program's
    # name in the cache on disk.
    kinds = [(cfg.window(i), _slots(keys)) for i, keys in enumerate(cache.keys)]
    masks = {kind: ring.visible(position_BS, kind[1], kind[0]) for kind in dict.fromkeys(kinds)}
    used = jnp.max(position_BS) + 1

    x_BSD = lanes.enter(model.tok_embeddings(ids_BS))
    local_lanes = len(model.layers[0].attention.wq.weight)
    x_LBSD = jnp.broadcast_to(x_BSD, (local_lanes, *x_BSD.shape))
    exchange = LaneExchange(cfg, lanes)
    keys, values = [], []
    for i, layer in enumerate(model.layers):
        rings = cache.keys[i], cache.values[i]
        seen = Seen(cos_BSh, sin_BSh, position_BS, masks[kinds[i]], used)
        attention = nnx.split((layer.attention_norm, layer.attention))
        y_LBSD, (key_ring, value_ring) = _attention(*attention, x_LBSD, rings, seen)
        keys.append(key_ring)
        values.append(value_ring)
        x_LBSD = exchange.add(i, ATTENTION, x_LBSD, y_LBSD)
        mlp = nnx.split((layer.ffn_norm, layer.feed_forward))
        x_LBSD = exchange.add(i, MLP, x_LBSD, _mlp(*mlp, x_LBSD))
    return x_LBSD, RingCache(tuple(keys), tuple(values), cache.length_B + seq)


class Seen(NamedTuple):
    """What a layer's attention needs to know of the tokens."""

    cos_BSh: jax.Array
    sin_BSh: jax.Array
    position_BS: jax.Array
    mask_BSR: jax.Array  # which slots of the layer's ring are seen
    used: jax.Array  # no slot from here on holds anything


Rings = tuple[Any, Any]  # keys and values of a layer: arrays, or blocks of them


# Functions of their own, since JAX traces one once for all layers that are alike: most of the time in which a
# compiled program is only looked up.
@partial(jax.jit, static_argnums=0)
def _attention(
    graph: nnx.GraphDef, weights: nnx.State, x_LBSD: jax.Array, rings: Rings, seen: Seen
) -> tuple[jax.Array, Rings]:
    norm, module = nnx.merge(graph, weights)
    q_LBSHd, k_LBSKd, v_LBSKd = module.projections(norm(x_LBSD), seen.cos_BSh, seen.sin_BSh)
    lead = q_LBSHd.shape[:3]
    q_LBSKGd = q_LBSHd.reshape(*lead, k_LBSKd.shape[3], -1, module.head_size)
    if isinstance(rings[0], tuple):
        rings = cache_blocks.put(*rings, k_LBSKd, v_LBSKd, seen.position_BS)
        out_LBSKGd = cache_blocks.attend(q_LBSKGd, *rings, seen.mask_BSR, seen.used)
    else:
        keys_GRd = ring.put(rings[0], k_LBSKd, seen.position_BS)
        values_GRd = ring.put(rings[1], v_LBSKd, seen.position_BS)
        rings = keys_GRd, values_GRd
        out_LBSKGd = attend_ring(q_LBSKGd, *rings, seen.mask_BSR)
    return module.wo(out_LBSKGd.reshape(*lead, -1)), rings


def _slots(keys: Any) -> int:
    return cache_blocks.slots_of(keys) if isinstance(keys, tuple) else keys.shape[1]


@partial(jax.jit, static_argnums=0)
def _mlp(graph: nnx.GraphDef, weights: nnx.State, x_LBSD: jax.Array) -> jax.Array:
    norm, module = nnx.merge(graph, weights)
    return module(norm(x_LBSD))
