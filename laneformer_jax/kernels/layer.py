"""Whole layers in one launch, one layer or all of a token: programs that stay, share out the tiles of one
operation after another, and meet in between.

Shapes: L lanes of this device, D hidden, T cache slots, K kv heads of a lane, d head size, N layers of a
launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from laneformer_jax.kernels import attention, gate_up, project, qkv
from laneformer_jax.kernels.backend import Backend, Ref, program
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.rows import Normed, Vector
from laneformer_jax.kernels.tuning import Tuning, block

PHASES = 5  # of a layer: norm_qkv, attention, attention_out, norm_gate_up, mlp_down


class Weights(NamedTuple):
    """In the model's layout."""

    qkv: qkv.Weights
    wo_LDI: jax.Array
    gate_up: gate_up.Weights
    w2_LDI: jax.Array


class Layer(NamedTuple):
    """A layer of a launch. A rule's past may be `Earlier`: made in the same launch."""

    weights: Weights
    keys_LKTd: jax.Array
    values_LKTd: jax.Array
    window: int | None
    rules: tuple[Rule, Rule]  # of attention and MLP


class Scratch(NamedTuple):
    """What programs hand to each other; its contents matter within a launch only, but for the
    counters, which are zeros before and after.

    Few arrays, since each takes scalar registers of an AMD GPU as long as a later phase needs it.
    """

    heads_LO: jax.Array  # queries; where all parts of a head have read its own, what it heard
    parts_LKSGe: jax.Array  # `attention.parts_shape`
    gated_LF: jax.Array
    # int32 [L·K + 2·L]: `attention.empty_counter`, and then two that count programs: those that came to a
    # meeting, and those that are done. With two for each lane, because all are split over devices.
    counters: jax.Array


class Made(NamedTuple):
    """What a launch leaves of one layer: raw outputs of both modules, the cache, and the outputs again
    as `project.Projected.sent_LD`."""

    attention_LD: jax.Array
    mlp_LD: jax.Array
    keys_LKTd: jax.Array
    values_LKTd: jax.Array
    attention_sent_LD: jax.Array | None = None
    mlp_sent_LD: jax.Array | None = None


class Output(NamedTuple):
    """After a launch: streams, what its layers made, and the scratch to go on with."""

    x_LD: jax.Array
    made: tuple[Made, ...]
    scratch: Scratch


def empty_scratch(
    lanes: int,
    heads: int,
    kv_heads: int,
    d: int,
    neurons: int,
    dtype: jnp.dtype,
    t: Tuning,
) -> Scratch:
    """Scratch for layers with so many heads, kv heads and neurons in a lane, one after another."""
    parts = attention.parts_shape(lanes, kv_heads, t.attention.splits, heads // kv_heads, d)
    return Scratch(
        jnp.zeros((lanes, heads * d), dtype),
        jnp.zeros(parts, jnp.float32),
        jnp.zeros((lanes, neurons), dtype),
        attention.empty_counter(lanes, kv_heads + 2),
    )


def run_layers(
    b: Backend,
    x_LD: jax.Array,
    layers: Sequence[Layer],
    eps: float,
    angles: tuple[jax.Array, jax.Array],
    position: jax.Array,
    scratch: Scratch,
    t: Tuning,
    name: str,
    send: bool = False,
    phase: int | None = None,
    sofar: Output | None = None,
) -> Output:
    """These layers, one after another, for one token.

    send: as in `project.project`.
    phase: only this one of N · `PHASES`, which needs no meeting and so any number of programs one after
    another; the phases before it have left `sofar`.
    """
    lanes, hidden = x_LD.shape
    programs = t.layer.count
    raw: Any = jax.ShapeDtypeStruct(x_LD.shape, x_LD.dtype)
    sent: Any = jax.ShapeDtypeStruct(x_LD.shape, jnp.float32) if send else None
    made = Output(
        x_LD,
        tuple(Made(raw, raw, one.keys_LKTd, one.values_LKTd, sent, sent) for one in layers),
        scratch,
    )
    before = sofar or made
    # What the kernel also reads, or keeps parts of, is the same memory as the output; the rest is written
    # whole.
    numbers = range(len(jax.tree.leaves(made)))
    written = jax.tree.unflatten(jax.tree.structure(made), numbers)
    whole = (
        {written.x_LD} | {n for one in written.made for n in (*one[:2], *one[4:])}
        if sofar is None
        else set()
    )
    kept = [n for n in numbers if n not in whole]
    read = jax.tree.leaves(before)
    pasts = [[_arrays(rule.past) for rule in one.rules] for one in layers]
    tree = ([one.weights for one in layers], pasts)
    others, structure = jax.tree.flatten(tree)
    inputs = [jnp.reshape(position, 1), *angles, x_LD, *others]

    def kernel(position_ref: Ref, cos_ref: Ref, sin_ref: Ref, x_ref: Ref, *rest: Ref) -> None:
        weights, past_refs = jax.tree.unflatten(structure, rest[: len(others)])
        out = jax.tree.unflatten(jax.tree.structure(made), rest[len(others) + len(kept) :])
        run = _Phases(
            b, t, lanes, hidden, eps, b.load(position_ref, 0), (cos_ref, sin_ref), out.scratch
        )
        counters, first = out.scratch.counters, lanes * layers[0].keys_LKTd.shape[1]
        todo: list[Callable[[], None]] = []
        for i, one in enumerate(layers):
            streams = (x_ref, False) if i == 0 else (out.x_LD, True)
            arriving = tuple(
                _refs(rule.past, refs, out.made)
                for rule, refs in zip(one.rules, past_refs[i], strict=True)
            )
            todo += run.of_layer(one, weights[i], out.made[i], streams, out.x_LD, arriving)
        for i, one_phase in enumerate(todo):
            if phase in (None, i):
                one_phase()
            if phase is None and i < len(todo) - 1:
                b.sync_programs(counters, first, programs)
        if phase is None:
            b.end_meetings(counters, first, programs)

    outputs = b.launch(
        kernel,
        name,
        (programs,),
        [*inputs, *(read[n] for n in kept)],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(made)],
        t.layer.launch,
        in_place={len(inputs) + i: n for i, n in enumerate(kept)},
    )
    result: Output = jax.tree.unflatten(jax.tree.structure(made), outputs)
    return result


class Earlier(NamedTuple):
    """The raw output of a module (0 attention, 1 MLP) of layer `layer` of the same launch, as the `own_LD`
    of a `Past`."""

    layer: int
    module: int


class _Arriving(NamedTuple):
    """What of other lanes reaches a module; all None: nothing. fresh: made in this launch."""

    own: Ref = None
    total: Ref = None
    fresh: bool = False


class _Phases(NamedTuple):
    """Operations of layers as phases of a kernel, and what they have in common."""

    b: Backend
    t: Tuning
    lanes: int
    hidden: int
    eps: float
    position: jax.Array
    angles: tuple[Ref, Ref]
    s: Scratch

    def of_layer(
        self,
        layer: Layer,
        w: Weights,
        out: Made,
        x: tuple[Ref, bool],  # streams before, and whether they were made in this launch
        streams_ref: Ref,  # after each module, in place: a tile reads the rows that it writes
        arriving: tuple[_Arriving, ...],
    ) -> list[Callable[[], None]]:
        """The five phases of a layer; their refs take the places of the arrays."""
        b, t, s = self.b, self.t, self.s
        x_ref, made_here = x

        def norm_qkv() -> None:
            matrices = (w.qkv.wq_LOD, w.qkv.wk_LOD, w.qkv.wv_LOD)
            into = (s.heads_LO, out.keys_LKTd, out.values_LKTd)
            refs = qkv.Refs(self.position, *self.angles, *matrices, *into)
            size = w.qkv.wq_LOD.shape[1] + 2 * w.qkv.wk_LOD.shape[1]
            rows = block(out.keys_LKTd.shape[3], t.qkv.rows)

            def tile(lane: jax.Array, row: jax.Array) -> None:
                source = Normed(Vector(x_ref, lane, fresh=made_here), w.qkv.norm, self.eps)
                qkv.tile(b, refs, source, lane, row, rows, t.qkv.columns)

            self._over_rows(size, rows, tile)

        def attend() -> None:
            cache = (out.keys_LKTd, out.values_LKTd)
            refs = attention.Refs(s.heads_LO, *cache, s.parts_LKSGe, s.heads_LO)
            heads, splits = out.keys_LKTd.shape[1], t.attention.splits

            def tile(i: jax.Array) -> None:
                split, i = lax.rem(i, jnp.int32(splits)), lax.div(i, jnp.int32(splits))
                head, lane = lax.rem(i, jnp.int32(heads)), lax.div(i, jnp.int32(heads))
                at = (self.position, layer.window, lane, head, split)
                attention.part(b, refs, *at, t.attention.keys, fresh=True)
                attention.combine_if_last(b, refs, s.counters, lane, head)

            self._share(splits * heads * self.lanes, tile)

        def attention_out() -> None:
            refs = project.Refs(
                x_ref,
                w.wo_LDI,
                streams_ref,
                out.attention_LD,
                *arriving[0][:2],
                out.attention_sent_LD,
            )
            self._project(refs, s.heads_LO, layer.rules[0], t.out, made_here, arriving[0].fresh)

        def norm_gate_up() -> None:
            refs = gate_up.Refs(w.gate_up.w1_LFD, w.gate_up.w3_LFD, s.gated_LF)
            size = w.gate_up.w1_LFD.shape[1]
            rows = block(size, t.gate_up.rows)

            def tile(lane: jax.Array, row: jax.Array) -> None:
                source = Normed(Vector(streams_ref, lane, fresh=True), w.gate_up.norm, self.eps)
                gate_up.tile(b, refs, source, lane, row, rows, t.gate_up.columns)

            self._over_rows(size, rows, tile)

        def mlp_down() -> None:
            mlp = (w.w2_LDI, streams_ref, out.mlp_LD, *arriving[1][:2], out.mlp_sent_LD)
            refs = project.Refs(streams_ref, *mlp)
            self._project(refs, s.gated_LF, layer.rules[1], t.down, True, arriving[1].fresh)

        return [norm_qkv, attend, attention_out, norm_gate_up, mlp_down]

    def _project(
        self, refs: project.Refs, a: Ref, rule: Rule, blocks: Any, fresh: bool, past_fresh: bool
    ) -> None:
        rows = block(self.hidden, blocks.rows)

        def tile(lane: jax.Array, row: jax.Array) -> None:
            source = Vector(a, lane, fresh=True)
            place = (lane, row, rows, blocks.columns)
            project.tile(self.b, refs, source, rule.scale, *place, fresh, past_fresh)

        self._over_rows(self.hidden, rows, tile)

    def _over_rows(
        self, size: int, rows: int, tile: Callable[[jax.Array, jax.Array], None]
    ) -> None:
        """Tiles of `rows` of `size` rows in each lane."""
        blocks = jnp.int32(size // rows)
        self._share(
            size // rows * self.lanes,
            lambda i: tile(lax.div(i, blocks), lax.rem(i, blocks) * rows),
        )

    def _share(self, count: int, tile: Callable[[jax.Array], None]) -> None:
        """Tiles 0 … count−1, every so many-th to each program."""
        pid, programs = program(0), self.t.layer.count

        def one(i: jax.Array, carry: jax.Array) -> jax.Array:
            tile(pid + i * programs)
            return carry

        lax.fori_loop(0, lax.div(count - pid + programs - 1, jnp.int32(programs)), one, 0)


def _arrays(past: Past | None) -> list[jax.Array]:
    """What a launch must be given of a past."""
    if past is None or isinstance(past.own_LD, Earlier):
        return []
    return [past.own_LD] if past.total_D is None else [past.own_LD, past.total_D]


def _refs(past: Past | None, given: list[Ref], made: tuple[Made, ...]) -> _Arriving:
    if past is None:
        return _Arriving()
    if isinstance(past.own_LD, Earlier):
        return _Arriving(made[past.own_LD.layer][past.own_LD.module], fresh=True)
    return _Arriving(*given)
