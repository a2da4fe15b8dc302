"""One query token against the cache: split over the keys, put together by the last part to finish.

Shapes: L lanes of this device, T cache slots, K kv heads of a lane, G queries per kv head, d head size,
O = K·G·d, P query rows of a tile, C keys read at once, W columns of a piece of a head, S parts,
e numbers that a part leaves of a query.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from laneformer_jax import attention
from laneformer_jax.kernels.backend import Backend, Ref, program, when
from laneformer_jax.kernels.tuning import Keys

_LEAST = 16  # rows and columns of a tile that tensor cores multiply
_NOTHING = -1e30  # score of a key that is not there


def reference(
    q_LO: jax.Array,
    keys_LKTd: jax.Array,
    values_LKTd: jax.Array,
    position: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of the token in slot `position` mod T over the last `window` tokens, [L,O].

    The cache is a ring: it holds the last T tokens, this one included.
    """
    lanes, heads, slots, d = keys_LKTd.shape
    age_T = (position - jnp.arange(slots)) % slots
    seen_T = (age_T <= position) & (age_T < (window or slots))
    q_LBSKGd = q_LO.reshape(lanes, 1, 1, heads, -1, d)
    keys_LBTKd, values_LBTKd = (x.swapaxes(1, 2)[:, None] for x in (keys_LKTd, values_LKTd))
    out = attention.attend(q_LBSKGd, keys_LBTKd, values_LBTKd, seen_T[None, None])
    return out.reshape(q_LO.shape)


def empty_counter(lanes: int, heads: int) -> jax.Array:
    """How many parts of each kv head have finished, int32 [L·K]. Every launch leaves zeros behind."""
    return jnp.zeros((lanes * heads,), jnp.int32)


def parts_shape(lanes: int, heads: int, splits: int, groups: int, d: int) -> tuple[int, ...]:
    """[L,K,S,G,e] of float32: what `part` leaves for `combine`, of every query the sum [d] of values
    under weights relative to the part's highest score; that score; and the sum of the weights, 0 where
    the part has no keys.

    One array, since each array of a launch takes scalar registers of an AMD GPU, and whole layers have
    many. Two more numbers keep rows aligned.
    """
    return lanes, heads, splits, groups, d + 4


def attend(
    b: Backend,
    q_LO: jax.Array,
    keys_LKTd: jax.Array,
    values_LKTd: jax.Array,
    position: jax.Array,
    window: int | None,
    counter: jax.Array,
    blocks: Keys,
) -> tuple[jax.Array, jax.Array]:
    """As `reference` in one launch, and the counter for the next one.

    The softmax is float32 and normalised at the end; only its weights are rounded to the cache's dtype.
    """
    lanes, heads, _, d = keys_LKTd.shape
    groups = q_LO.shape[1] // (heads * d)
    parts = parts_shape(lanes, heads, blocks.splits, groups, d)

    def kernel(
        position_ref: Ref,
        q_ref: Ref,
        keys_ref: Ref,
        values_ref: Ref,
        _counter_in: Ref,
        out_ref: Ref,
        parts_ref: Ref,
        counter_ref: Ref,
    ) -> None:
        refs = Refs(q_ref, keys_ref, values_ref, parts_ref, out_ref)
        split, head, lane = program(0), program(1), program(2)
        part(b, refs, b.load(position_ref, 0), window, lane, head, split, blocks.keys)
        combine_if_last(b, refs, counter_ref, lane, head)

    out, _, counter = b.launch(
        kernel,
        "attention",
        (blocks.splits, heads, lanes),
        [jnp.reshape(position, 1), q_LO, keys_LKTd, values_LKTd, counter],
        [
            jax.ShapeDtypeStruct(q_LO.shape, q_LO.dtype),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(counter.shape, counter.dtype),
        ],
        blocks.launch,
        in_place={4: 2},
    )
    return out, counter


class Refs(NamedTuple):
    """What `part` and `combine` read and write."""

    q: Ref
    keys: Ref
    values: Ref
    parts: Ref  # see `parts_shape`
    out: Ref


def part(
    b: Backend,
    refs: Refs,
    position: jax.Array,
    window: int | None,
    lane: jax.Array,
    head: jax.Array,
    split: jax.Array,
    keys_at_once: int,
    fresh: bool = False,
) -> None:
    """Part `split` of the visible keys of one kv head. fresh: q and the cache are of this launch."""
    slots, d = refs.keys.shape[2:]
    splits, groups = refs.parts.shape[2:4]
    dtype = refs.keys.dtype
    row_P = jnp.arange(max(_LEAST, _power_of_two(groups)))
    query_P = row_P < groups
    pieces = _pieces(d)

    known = position + 1
    seen = jnp.minimum(known, min(window or slots, slots))
    oldest = lax.rem(known - seen, jnp.int32(slots))
    step = splits * keys_at_once
    length = lax.div(seen + step - 1, jnp.int32(step)) * keys_at_once
    begin = split * length
    end = jnp.minimum(begin + length, seen)

    queries = []
    for column_W, inside in pieces:
        at = (head * groups + row_P)[:, None] * d + column_W
        queries.append(b.load(refs.q, lane, at, mask=query_P[:, None] & inside, fresh=fresh))

    def cached(ref: Ref, slot_C: jax.Array) -> list[jax.Array]:
        places = [(lane, head, slot_C[:, None], column) for column, _ in pieces]
        masks = [None if inside is True else inside for _, inside in pieces]
        return [b.load(ref, *at, mask=m, fresh=fresh) for at, m in zip(places, masks, strict=True)]

    def block(i: jax.Array, state: tuple) -> tuple:
        peak_P, total_P, weighted = state
        index_C = begin + i * keys_at_once + jnp.arange(keys_at_once)
        live_C = index_C < end
        # Behind the end the last key again, to no effect: a mask of every load would take registers.
        slot_C = oldest + jnp.minimum(index_C, seen - 1)
        slot_C = jnp.where(slot_C >= slots, slot_C - slots, slot_C)
        keys, values = cached(refs.keys, slot_C), cached(refs.values, slot_C)
        score_PC = sum(b.dot(q, k.T) for q, k in zip(queries, keys, strict=True)) * d**-0.5
        score_PC = jnp.where(live_C[None], score_PC, _NOTHING)
        new_P = jnp.maximum(peak_P, jnp.max(score_PC, axis=1))
        weight_PC = jnp.exp(score_PC - new_P[:, None])  # 0 where nothing is there: some keys are
        fade_P = jnp.exp(peak_P - new_P)
        total_P = total_P * fade_P + jnp.sum(weight_PC, axis=1)
        weighted = tuple(
            old * fade_P[:, None] + b.dot(weight_PC.astype(dtype), value)
            for old, value in zip(weighted, values, strict=True)
        )
        return new_P, total_P, weighted

    rows = row_P.shape[0]
    peak_P, total_P, weighted = lax.fori_loop(
        0,
        lax.div(jnp.maximum(end - begin, 0) + keys_at_once - 1, jnp.int32(keys_at_once)),
        block,
        (
            jnp.full((rows,), _NOTHING, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            tuple(jnp.zeros((rows, column.shape[1]), jnp.float32) for column, _ in pieces),
        ),
    )
    for column, number_P in ((d, peak_P), (d + 1, total_P)):
        b.store(refs.parts, lane, head, split, row_P, column, value=number_P, mask=query_P)
    for (column_W, inside), value in zip(pieces, weighted, strict=True):
        at = (lane, head, split, row_P[:, None], column_W)
        b.store(refs.parts, *at, value=value, mask=query_P[:, None] & inside)


def combine_if_last(b: Backend, refs: Refs, counter: Ref, lane: jax.Array, head: jax.Array) -> None:
    """After a `part`: the last of a kv head's parts to get here puts them together."""
    splits, mine = refs.parts.shape[2], lane * refs.keys.shape[1] + head
    # Every thread's part is written before the one that counts says so.
    b.sync_threads()
    finished = b.fetch_add(counter, mine, 1)

    @when(finished == splits - 1)
    def last() -> None:
        combine(b, refs, lane, head)
        b.store(counter, mine, value=jnp.int32(0))


def combine(b: Backend, refs: Refs, lane: jax.Array, head: jax.Array) -> None:
    """Put the parts of one kv head together; they were written during this launch."""
    d = refs.keys.shape[3]
    splits, groups = refs.parts.shape[2:4]
    row_G = jnp.arange(_power_of_two(groups))
    query_G = row_G < groups
    split_S = jnp.arange(_power_of_two(splits))
    parts = (lane, head, split_S[:, None], row_G[None])
    there_SG = (split_S < splits)[:, None] & query_G[None]
    total_SG = b.load(refs.parts, *parts, d + 1, mask=there_SG, fresh=True)
    # A part without keys has the lowest peak of all, and no weight.
    peak_SG = b.load(refs.parts, *parts, d, mask=there_SG, fresh=True)
    peak_SG = jnp.where(total_SG > 0, peak_SG, _NOTHING)
    share_SG = jnp.exp(peak_SG - jnp.max(peak_SG, axis=0)[None])
    share_SG = jnp.where(total_SG > 0, share_SG, 0.0)
    scale_G = 1.0 / jnp.sum(share_SG * total_SG, axis=0)
    for column_1W, inside in _pieces(d):
        at = (lane, head, split_S[:, None, None], row_G[None, :, None], column_1W[None])
        there = there_SG[:, :, None] & inside
        value_SGW = b.load(refs.parts, *at, mask=there, fresh=True)
        value_GW = jnp.sum(value_SGW * share_SG[:, :, None], axis=0) * scale_G[:, None]
        at_GW = (head * groups + row_G)[:, None] * d + column_1W
        b.store(refs.out, lane, at_GW, value=value_GW, mask=query_G[:, None] & inside)


def _pieces(d: int) -> list[tuple[jax.Array, jax.Array | bool]]:
    """Columns [1,W] that make up a head in power-of-two pieces, and which of them lie inside it.

    True where all do: a mask of a tile takes registers, on AMD scarce ones.
    """
    pieces: list[tuple[jax.Array, jax.Array | bool]] = []
    start = 0
    while start < d:
        width = max(1 << (d - start).bit_length() - 1, _LEAST)
        column_1W = start + jnp.arange(width)[None]
        pieces.append((column_1W, start + width <= d or column_1W < d))
        start += width
    return pieces


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
