"""RMSNorm, query, key and value projections, RoPE, and the cache write of one token.

Shapes: L lanes of this device, D hidden, O output rows, T cache slots, H query heads and K kv heads of a
lane, d head size, h = d/2, R rows of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from laneformer_jax import rope
from laneformer_jax.kernels import plain
from laneformer_jax.kernels.backend import Backend, Ref, program, when
from laneformer_jax.kernels.rows import Normed, Vector, products
from laneformer_jax.kernels.tuning import Rows, block


class Weights(NamedTuple):
    """In the model's layout."""

    norm: jax.Array  # [D], or [L,D] with a scale per lane
    wq_LOD: jax.Array
    wk_LOD: jax.Array
    wv_LOD: jax.Array


def reference(
    x_LD: jax.Array,
    weights: Weights,
    eps: float,
    angles: tuple[jax.Array, jax.Array],
    keys_LKTd: jax.Array,
    values_LKTd: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [L,O] after RoPE, and the cache with this token in slot `position` mod T.

    angles: float32 cosines and sines [h] of this position.
    """
    slots, d = keys_LKTd.shape[2:]
    h_LD = plain.normed(x_LD, weights.norm, eps)

    def project(w_LOD: jax.Array, rotate: bool) -> jax.Array:
        heads_LNd = plain.matmul(h_LD, w_LOD).reshape(len(h_LD), -1, d)
        if not rotate:
            return heads_LNd
        cos_BSh, sin_BSh = (a[None, None] for a in angles)
        return rope.rotate(heads_LNd[:, None, None], cos_BSh, sin_BSh)[:, 0, 0]

    at = (0, 0, position % slots, 0)
    k_LKd, v_LKd = project(weights.wk_LOD, True), project(weights.wv_LOD, False)
    keys_LKTd = lax.dynamic_update_slice(keys_LKTd, k_LKd[:, :, None].astype(keys_LKTd.dtype), at)
    values_LKTd = lax.dynamic_update_slice(
        values_LKTd, v_LKd[:, :, None].astype(values_LKTd.dtype), at
    )
    return project(weights.wq_LOD, True).reshape(len(h_LD), -1), keys_LKTd, values_LKTd


def qkv(
    b: Backend,
    x_LD: jax.Array,
    weights: Weights,
    eps: float,
    angles: tuple[jax.Array, jax.Array],
    keys_LKTd: jax.Array,
    values_LKTd: jax.Array,
    position: jax.Array,
    blocks: Rows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `reference`, in one launch; the cache is updated in place where the caller donated it."""
    lanes = x_LD.shape[0]
    d = keys_LKTd.shape[-1]
    q_rows, kv_rows = weights.wq_LOD.shape[1], weights.wk_LOD.shape[1]
    rows = block(d, blocks.rows)  # a program stays within one head

    def kernel(
        position_ref: Ref,
        cos_ref: Ref,
        sin_ref: Ref,
        x_ref: Ref,
        norm_ref: Ref,
        wq_ref: Ref,
        wk_ref: Ref,
        wv_ref: Ref,
        _keys_in: Ref,
        _values_in: Ref,
        q_ref: Ref,
        keys_ref: Ref,
        values_ref: Ref,
    ) -> None:
        refs = Refs(
            b.load(position_ref, 0),
            cos_ref,
            sin_ref,
            wq_ref,
            wk_ref,
            wv_ref,
            q_ref,
            keys_ref,
            values_ref,
        )
        lane = program(1)
        source = Normed(Vector(x_ref, lane), norm_ref, eps)
        tile(b, refs, source, lane, program(0) * rows, rows, blocks.columns)

    out = jax.ShapeDtypeStruct((lanes, q_rows), x_LD.dtype)
    q_LO, keys_LKTd, values_LKTd = b.launch(
        kernel,
        "norm_qkv",
        ((q_rows + 2 * kv_rows) // rows, lanes),
        [jnp.reshape(position, 1), *angles, x_LD, *weights, keys_LKTd, values_LKTd],
        [out, _like(keys_LKTd), _like(values_LKTd)],
        blocks.launch,
        in_place={8: 1, 9: 2},
    )
    return q_LO, keys_LKTd, values_LKTd


class Refs(NamedTuple):
    """What `tile` reads and writes."""

    position: jax.Array
    cos: Ref
    sin: Ref
    wq: Ref
    wk: Ref
    wv: Ref
    q: Ref
    keys: Ref
    values: Ref


def tile(
    b: Backend, refs: Refs, source: Normed, lane: jax.Array, row: jax.Array, rows: int, columns: int
) -> None:
    """Rows `row` … of the queries, keys and values laid end to end, of one lane."""
    hidden = refs.wq.shape[2]
    q_rows, kv_rows = refs.wq.shape[1], refs.wk.shape[1]
    slots, d = refs.keys.shape[2:]
    slot = lax.rem(refs.position, jnp.int32(slots))
    dtype = source.vector.ref.dtype
    pair_R = jnp.arange(rows // 2)

    def pairs(w_ref: Ref, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows 2i and 2i+1 of a block, [R/2] each, rounded as the projections are."""
        even, odd = products(
            b,
            [(w_ref, (lane, first + 2 * pair_R)), (w_ref, (lane, first + 2 * pair_R + 1))],
            source,
            hidden,
            columns,
        )
        return b.rounded(even, dtype), b.rounded(odd, dtype)

    def rotated(w_ref: Ref, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        even, odd = pairs(w_ref, first)
        angle_R = lax.div(lax.rem(first, jnp.int32(d)), jnp.int32(2)) + pair_R
        cos, sin = b.load(refs.cos, angle_R), b.load(refs.sin, angle_R)
        return even * cos - odd * sin, even * sin + odd * cos

    def to_cache(ref: Ref, first: jax.Array, both: tuple[jax.Array, jax.Array]) -> None:
        head, column = lax.div(first, jnp.int32(d)), lax.rem(first, jnp.int32(d))
        for parity, value in enumerate(both):
            b.store(ref, lane, head, slot, column + 2 * pair_R + parity, value=value)

    @when(row < q_rows)
    def queries() -> None:
        for parity, value in enumerate(rotated(refs.wq, row)):
            b.store(refs.q, lane, row + 2 * pair_R + parity, value=value)

    @when((row >= q_rows) & (row < q_rows + kv_rows))
    def keys() -> None:
        to_cache(refs.keys, row - q_rows, rotated(refs.wk, row - q_rows))

    @when(row >= q_rows + kv_rows)
    def values() -> None:
        first = row - q_rows - kv_rows
        to_cache(refs.values, first, pairs(refs.wv, first))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
