"""Grouped-query attention within each lane, and who may see whom.

Shapes: L lanes of this device, B batch, S queries, T keys, K kv heads of a lane, G queries per kv head,
d head size; R slots of a ring, M = L·B·K.
"""

import jax
import jax.numpy as jnp

from laneformer_jax.precision import rounded


def visibility(
    query_index_S: jax.Array,
    key_index_T: jax.Array,
    window: int | None,
    key_valid_BT: jax.Array | None = None,
    query_segment_BS: jax.Array | None = None,
    key_segment_BT: jax.Array | None = None,
) -> jax.Array:
    """Boolean mask [B or 1,S,T]: causal, within `window` keys (own included), valid, same document.

    The window counts slots, not positions, so that padding and packing do not stretch it.
    """
    distance = query_index_S[:, None] - key_index_T[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    mask = mask[None]
    if key_valid_BT is not None:
        mask = mask & key_valid_BT[:, None, :]
    if query_segment_BS is not None and key_segment_BT is not None:
        mask = mask & (query_segment_BS[:, :, None] == key_segment_BT[:, None, :])
    return mask


def attend(
    q_LBSKGd: jax.Array, k_LBTKd: jax.Array, v_LBTKd: jax.Array, mask_BST: jax.Array
) -> jax.Array:
    """softmax(q kᵀ / √d) v -> [L,B,S,K,G,d]; the softmax is float32, products in the inputs' dtype.

    A query that may see nothing attends to everything evenly: finite, and never read.
    """
    dtype = q_LBSKGd.dtype
    scores = jnp.einsum("lbskgd,lbtkd->lbkgst", q_LBSKGd, k_LBTKd)
    scores = scores * jnp.asarray(q_LBSKGd.shape[-1] ** -0.5, dtype)
    scores = jnp.where(mask_BST[None, :, None, None], scores, jnp.finfo(dtype).min)
    weights = rounded(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), dtype)
    return jnp.einsum("lbkgst,lbtkd->lbskgd", weights, v_LBTKd)


def attend_ring(
    q_LBSKGd: jax.Array, k_MRd: jax.Array, v_MRd: jax.Array, mask_BSR: jax.Array
) -> jax.Array:
    """`attend` to the rings of `cache.RingCache`."""
    lanes, batch, seq, heads, group, d = q_LBSKGd.shape
    dtype = q_LBSKGd.dtype
    q_MQd = jnp.moveaxis(q_LBSKGd, 2, 3).reshape(-1, seq * group, d)
    scores = jnp.einsum("mqd,mrd->mqr", q_MQd, k_MRd) * jnp.asarray(d**-0.5, dtype)
    mask = mask_BSR[None, :, None, :, None]
    scores = scores.reshape(lanes, batch, heads, seq, group, -1)
    scores = jnp.where(mask, scores, jnp.finfo(dtype).min).reshape(*q_MQd.shape[:2], -1)
    weights_MQR = rounded(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), dtype)
    out_MQd = jnp.einsum("mqr,mrd->mqd", weights_MQR, v_MRd)
    return jnp.moveaxis(out_MQd.reshape(lanes, batch, heads, seq, group, d), 3, 2)
