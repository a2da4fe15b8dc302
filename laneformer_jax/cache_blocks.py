"""A ring in blocks, of which attention reads only those in use: for CPUs, where that is what a token costs.

The first block has 256 slots, each further one as many as all before it. They are arrays of their own, since
XLA copies a part of an array before it multiplies it. Keys stand with their slots last: several queries share
a kv head, and only in that order does XLA multiply them all in one pass over the keys.

Shapes: L lanes of this device, B batch, S tokens at once, K kv heads of a lane, G queries per kv head,
R slots of a ring, r of a block, M = L·B·K, Q = S·G, d head size.
"""

import itertools

import jax
import jax.numpy as jnp

from laneformer_jax.precision import rounded

FIRST = 256  # slots
Blocks = tuple[jax.Array, ...]  # of a layer's keys [M,d,r] or values [M,r,d]


def bounds(slots: int) -> list[tuple[int, int]]:
    """First slot of each block of a ring, and the one behind its last."""
    ends = [0, min(FIRST, slots)]
    while ends[-1] < slots:
        ends.append(min(2 * ends[-1], slots))
    return list(itertools.pairwise(ends))


def empty(heads: int, slots: int, head_size: int, dtype: jnp.dtype) -> tuple[Blocks, Blocks]:
    """Keys and values of `heads` (M) kv heads."""
    sizes = [end - start for start, end in bounds(slots)]
    keys = tuple(jnp.zeros((heads, head_size, r), dtype) for r in sizes)
    return keys, tuple(jnp.zeros((heads, r, head_size), dtype) for r in sizes)


def slots_of(keys: Blocks) -> int:
    return sum(block.shape[2] for block in keys)


def put(
    keys: Blocks, values: Blocks, k_LBSKd: jax.Array, v_LBSKd: jax.Array, position_BS: jax.Array
) -> tuple[Blocks, Blocks]:
    """Both with S new entries at their positions, S at most R."""
    lanes, batch, seq, heads, d = k_LBSKd.shape
    k_MSd = k_LBSKd.swapaxes(2, 3).reshape(-1, seq, d).astype(keys[0].dtype)
    v_MSd = v_LBSKd.swapaxes(2, 3).reshape(-1, seq, d).astype(values[0].dtype)
    slots = slots_of(keys)
    slot_B1S = (position_BS % slots)[:, None]
    slot_MS = jnp.broadcast_to(slot_B1S, (lanes, batch, heads, seq)).reshape(-1, seq)
    row_M1 = jnp.arange(len(slot_MS))[:, None]
    new_keys, new_values = [], []
    for key_Mdr, value_Mrd, (start, end) in zip(keys, values, bounds(slots), strict=True):
        inside = (slot_MS >= start) & (slot_MS < end)
        at_MS = jnp.where(inside, slot_MS - start, end - start)  # beyond the end: dropped
        new_keys.append(key_Mdr.at[row_M1, :, at_MS].set(k_MSd, mode="drop"))
        new_values.append(value_Mrd.at[row_M1, at_MS].set(v_MSd, mode="drop"))
    return tuple(new_keys), tuple(new_values)


def attend(
    q_LBSKGd: jax.Array, keys: Blocks, values: Blocks, mask_BSR: jax.Array, used: jax.Array
) -> jax.Array:
    """`attention.attend` to a ring of which the first `used` slots hold something -> [L,B,S,K,G,d].

    The softmax goes block by block, in float32: what the blocks so far add up to is scaled down when a larger
    score comes (Milakov and Gimelshein 2018).
    """
    lanes, batch, seq, heads, group, d = q_LBSKGd.shape
    dtype = q_LBSKGd.dtype
    q_MQd = jnp.moveaxis(q_LBSKGd, 2, 3).reshape(-1, seq * group, d)
    spans = bounds(mask_BSR.shape[-1])

    def from_block(i: int, sofar: tuple[jax.Array, ...] | None) -> tuple[jax.Array, ...]:
        (start, end), key_Mdr, value_Mrd = spans[i], keys[i], values[i]
        scores = jnp.einsum("mqd,mdr->mqr", q_MQd, key_Mdr) * jnp.asarray(d**-0.5, dtype)
        scores = scores.reshape(lanes, batch, heads, seq, group, -1)
        mask = mask_BSR[None, :, None, :, None, start:end]
        scores = jnp.where(mask, scores, jnp.finfo(dtype).min).reshape(*q_MQd.shape[:2], -1)
        scores_MQr = scores.astype(jnp.float32)
        most_MQ1 = jnp.max(scores_MQr, axis=-1, keepdims=True)
        if sofar is not None:
            most_MQ1 = jnp.maximum(most_MQ1, sofar[0])
        weights_MQr = jnp.exp(scores_MQr - most_MQ1)
        total_MQ1 = jnp.sum(weights_MQr, axis=-1, keepdims=True)
        out_MQd = jnp.einsum("mqr,mrd->mqd", rounded(weights_MQr, dtype), value_Mrd)
        out_MQd = out_MQd.astype(jnp.float32)
        if sofar is not None:
            scale_MQ1 = jnp.exp(sofar[0] - most_MQ1)
            total_MQ1 += scale_MQ1 * sofar[1]
            out_MQd += scale_MQ1 * sofar[2]
        result = most_MQ1, total_MQ1, out_MQd
        if i + 1 == len(spans):
            return result
        # One inside the other, so that a short context decides once.
        more = used > end
        return jax.lax.cond(more, lambda so: from_block(i + 1, so), lambda so: so, result)

    _, total_MQ1, out_MQd = from_block(0, None)
    out = rounded(out_MQd / total_MQ1, dtype).reshape(lanes, batch, heads, seq, group, d)
    return jnp.moveaxis(out, 3, 2)
