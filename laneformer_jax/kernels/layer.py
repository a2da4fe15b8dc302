"""A whole layer in one launch: programs that stay, share out the tiles of one operation after another, and
meet in between.

Shapes: L lanes of this device, D hidden, T cache slots, K kv heads of a lane, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from laneformer_jax.kernels import attention, gate_up, project, qkv
from laneformer_jax.kernels.backend import Backend, Ref, program
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.rows import Normed, Vector
from laneformer_jax.kernels.tuning import Tuning, block

PHASES = 5  # norm_qkv, attention, attention_out, norm_gate_up, mlp_down


class Weights(NamedTuple):
    """In the model's layout."""

    qkv: qkv.Weights
    wo_LDI: jax.Array
    gate_up: gate_up.Weights
    w2_LDI: jax.Array


class Scratch(NamedTuple):
    """What programs hand to each other; its contents matter within a launch only, but for the two
    counters, which must start as zeros."""

    q_LO: jax.Array
    heard_LO: jax.Array
    weighted: jax.Array
    peak: jax.Array
    total: jax.Array
    between_LD: jax.Array  # streams after attention
    gated_LF: jax.Array
    parts: jax.Array  # `attention.empty_counter`
    meetings: jax.Array  # int32 [L], of which the first counts: split over devices as the others


class Output(NamedTuple):
    """After a layer: streams, raw outputs of both modules, cache, and the scratch to go on with."""

    x_LD: jax.Array
    attention_LD: jax.Array
    mlp_LD: jax.Array
    keys_LKTd: jax.Array
    values_LKTd: jax.Array
    scratch: Scratch


def empty_scratch(
    streams: tuple[int, int],
    heads: int,
    kv_heads: int,
    d: int,
    neurons: int,
    dtype: jnp.dtype,
    t: Tuning,
) -> Scratch:
    """Scratch for layers with streams [L,D] and so many heads, kv heads and neurons in a lane, one after
    another."""
    lanes = streams[0]
    parts = (lanes, kv_heads, t.attention.splits, heads // kv_heads)
    return Scratch(
        jnp.zeros((lanes, heads * d), dtype),
        jnp.zeros((lanes, heads * d), dtype),
        jnp.zeros((*parts, d), jnp.float32),
        jnp.zeros(parts, jnp.float32),
        jnp.zeros(parts, jnp.float32),
        jnp.zeros(streams, dtype),
        jnp.zeros((lanes, neurons), dtype),
        attention.empty_counter(lanes, kv_heads),
        jnp.zeros((lanes,), jnp.int32),
    )


def layer(
    b: Backend,
    x_LD: jax.Array,
    weights: Weights,
    eps: float,
    angles: tuple[jax.Array, jax.Array],
    keys_LKTd: jax.Array,
    values_LKTd: jax.Array,
    position: jax.Array,
    window: int | None,
    rules: tuple[Rule, Rule],
    scratch: Scratch,
    t: Tuning,
    y_dtype: jnp.dtype | None = None,
    phase: int | None = None,
    sofar: Output | None = None,
) -> Output:
    """One layer for one token.

    y_dtype: of the modules' raw outputs, as in `project.project`.
    phase: only this one, which needs no meeting and so any number of programs one after another; the
    phases before it have left `sofar`.
    """
    lanes, hidden = x_LD.shape
    programs = t.layer.count
    pasts = [p for rule in rules if rule.past is not None for p in _arrays(rule.past)]
    flat_weights = jax.tree.leaves(weights)
    raw: Any = jax.ShapeDtypeStruct(x_LD.shape, y_dtype or x_LD.dtype)
    made = Output(x_LD, raw, raw, keys_LKTd, values_LKTd, scratch)
    if sofar is None:
        kept, first = [keys_LKTd, values_LKTd, *scratch], 3  # the others are written whole
    else:
        kept, first = jax.tree.leaves(sofar), 0
    inputs = [jnp.reshape(position, 1), *angles, x_LD, *flat_weights, *pasts]

    def kernel(position_ref: Ref, cos_ref: Ref, sin_ref: Ref, x_ref: Ref, *rest: Ref) -> None:
        w = jax.tree.unflatten(jax.tree.structure(weights), rest[: len(flat_weights)])
        past_refs = list(rest[len(flat_weights) : len(flat_weights) + len(pasts)])
        out = jax.tree.unflatten(jax.tree.structure(made), rest[len(inputs) - 4 + len(kept) :])
        s = out.scratch
        at = b.load(position_ref, 0)
        pid = program(0)

        def share(count: int, tile: Callable[[jax.Array], None]) -> None:
            """Tiles 0 … count−1, every `programs`-th to each program."""

            def one(i: jax.Array, carry: jax.Array) -> jax.Array:
                tile(pid + i * programs)
                return carry

            lax.fori_loop(0, lax.div(count - pid + programs - 1, jnp.int32(programs)), one, 0)

        def over_rows(size: int, rows: int, tile: Callable[[jax.Array, jax.Array], None]) -> None:
            """Tiles of `rows` of `size` rows in each lane."""
            blocks = size // rows
            share(
                blocks * lanes,
                lambda i: tile(lax.div(i, jnp.int32(blocks)), lax.rem(i, jnp.int32(blocks)) * rows),
            )

        def norm_qkv() -> None:
            refs = qkv.Refs(
                at,
                cos_ref,
                sin_ref,
                w.qkv.wq_LOD,
                w.qkv.wk_LOD,
                w.qkv.wv_LOD,
                s.q_LO,
                out.keys_LKTd,
                out.values_LKTd,
            )
            size = w.qkv.wq_LOD.shape[1] + 2 * w.qkv.wk_LOD.shape[1]
            rows = block(out.keys_LKTd.shape[3], t.qkv.rows)

            def tile(lane: jax.Array, row: jax.Array) -> None:
                source = Normed(Vector(x_ref, lane), w.qkv.norm, eps)
                qkv.tile(b, refs, source, lane, row, rows, t.qkv.columns)

            over_rows(size, rows, tile)

        def attend() -> None:
            refs = attention.Refs(
                s.q_LO, out.keys_LKTd, out.values_LKTd, s.weighted, s.peak, s.total, s.heard_LO
            )
            heads, splits = out.keys_LKTd.shape[1], t.attention.splits

            def tile(i: jax.Array) -> None:
                split, i = lax.rem(i, jnp.int32(splits)), lax.div(i, jnp.int32(splits))
                head, lane = lax.rem(i, jnp.int32(heads)), lax.div(i, jnp.int32(heads))
                keys = t.attention.keys
                attention.part(b, refs, at, window, lane, head, split, keys, fresh=True)
                attention.combine_if_last(b, refs, s.parts, lane, head)

            share(splits * heads * lanes, tile)

        def attention_out() -> None:
            into(x_ref, s.heard_LO, w.wo_LDI, s.between_LD, out.attention_LD, 0, fresh=False)

        def norm_gate_up() -> None:
            refs = gate_up.Refs(w.gate_up.w1_LFD, w.gate_up.w3_LFD, s.gated_LF)
            size = w.gate_up.w1_LFD.shape[1]
            rows = block(size, t.gate_up.rows)

            def tile(lane: jax.Array, row: jax.Array) -> None:
                source = Normed(Vector(s.between_LD, lane, fresh=True), w.gate_up.norm, eps)
                gate_up.tile(b, refs, source, lane, row, rows, t.gate_up.columns)

            over_rows(size, rows, tile)

        def mlp_down() -> None:
            into(s.between_LD, s.gated_LF, w.w2_LDI, out.x_LD, out.mlp_LD, 1, fresh=True)

        def into(
            stream: Ref, a: Ref, matrix: Ref, after: Ref, y: Ref, module: int, fresh: bool
        ) -> None:
            blocks = (t.out, t.down)[module]
            rows = block(hidden, blocks.rows)
            before = len(_arrays(rules[0].past)) if module else 0
            own_past = past_refs[before : before + len(_arrays(rules[module].past))]
            refs = project.Refs(stream, matrix, after, y, *own_past)

            def tile(lane: jax.Array, row: jax.Array) -> None:
                source = Vector(a, lane, fresh=True)
                scale = rules[module].scale
                project.tile(b, refs, source, scale, lane, row, rows, blocks.columns, fresh)

            over_rows(hidden, rows, tile)

        phases = (norm_qkv, attend, attention_out, norm_gate_up, mlp_down)
        for i, run in enumerate(phases):
            if phase in (None, i):
                run()
            if phase is None and i < PHASES - 1:
                b.sync_programs(s.meetings, programs)

    outputs = b.launch(
        kernel,
        "layer",
        (programs,),
        [*inputs, *kept],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(made)],
        t.layer.launch,
        in_place={len(inputs) + i: first + i for i in range(len(kept))},
    )
    result: Output = jax.tree.unflatten(jax.tree.structure(made), outputs)
    return result


def _arrays(past: Past | None) -> list[jax.Array]:
    if past is None:
        return []
    return [past.own_LD] if past.total_D is None else [past.own_LD, past.total_D]
