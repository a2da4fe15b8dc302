"""A module's output matrix and its way into the residual streams: wo after attention, w2 in the MLP.

Shapes: L lanes of this device, D hidden, I inputs of a lane, R rows of a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from laneformer_jax.kernels import plain
from laneformer_jax.kernels.backend import Backend, Ref, program
from laneformer_jax.kernels.rows import Vector, products
from laneformer_jax.kernels.tuning import Rows, block
from laneformer_jax.precision import rounded


@dataclass(frozen=True)
class Past:
    """The partial outputs that reach this module from δ layers ago: `own_LD` of these lanes, and the sum
    over all lanes, float32 [D]. None: all lanes are these. In a launch of several layers `own_LD` may be a
    `layer.Earlier`."""

    own_LD: Any
    total_D: jax.Array | None = None


@dataclass(frozen=True)
class Rule:
    """How a module's output enters the streams: see `reference`."""

    scale: float = 1.0
    past: Past | None = None


class Projected(NamedTuple):
    """Residual streams after the module, and its raw output y; `sent_LD` is y in float32 for a sum over
    devices, which may then take that memory for its result."""

    x_LD: jax.Array
    y_LD: jax.Array
    sent_LD: jax.Array | None = None


def reference(
    x_LD: jax.Array, a_LI: jax.Array, w_LDI: jax.Array, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Residual streams after the module, and its raw output y; both [L,D].

    x + scale·y, plus the other lanes' part of `past`: the rules and the roundings of
    `exchange.LaneExchange.add`. The scale is 1, or √L where a lane stands for all.
    """
    past = rule.past
    y_LD = plain.matmul(a_LI, w_LDI)
    own_LD = plain.times(y_LD, rule.scale)
    if past is not None:
        total_D = past.total_D
        if total_D is None:
            total_D = jnp.sum(past.own_LD.astype(jnp.float32), axis=0)
        total_D = rounded(total_D, x_LD.dtype)
        own_LD = plain.plus(own_LD, plain.plus(total_D, -past.own_LD))
    return plain.plus(x_LD, own_LD), y_LD


def project(
    b: Backend,
    x_LD: jax.Array,
    a_LI: jax.Array,
    w_LDI: jax.Array,
    rule: Rule,
    name: str,
    blocks: Rows,
    send: bool = False,
) -> Projected:
    """As `reference`, in one launch. send: with `Projected.sent_LD`."""
    lanes, hidden = x_LD.shape
    rows = block(hidden, blocks.rows)
    past = rule.past
    extra = [] if past is None else [past.own_LD]
    if past is not None and past.total_D is not None:
        extra.append(past.total_D)

    def kernel(x_ref: Ref, a_ref: Ref, w_ref: Ref, *rest: Ref) -> None:
        past_ref, total_ref = [*rest[: len(extra)], None, None][:2]
        out_ref, y_ref, sent_ref = [*rest[len(extra) :], None][:3]
        lane = program(1)
        source = Vector(a_ref, lane)
        refs = Refs(x_ref, w_ref, out_ref, y_ref, past_ref, total_ref, sent_ref)
        tile(b, refs, source, rule.scale, lane, program(0) * rows, rows, blocks.columns)

    shape = jax.ShapeDtypeStruct(x_LD.shape, x_LD.dtype)
    sent = [jax.ShapeDtypeStruct(x_LD.shape, jnp.float32)] if send else []
    made = b.launch(
        kernel,
        name,
        (hidden // rows, lanes),
        [x_LD, a_LI, w_LDI, *extra],
        [shape, shape, *sent],
        blocks.launch,
    )
    return Projected(*made)


@dataclass(frozen=True)
class Refs:
    """What `tile` reads and writes."""

    x: Ref
    w: Ref
    out: Ref
    y: Ref
    past: Ref = None
    total: Ref = None
    sent: Ref = None


def tile(
    b: Backend,
    refs: Refs,
    source: Vector,
    scale: float,
    lane: Any,
    row: Any,
    rows: int,
    columns: int,
    fresh: bool = False,
    past_fresh: bool = False,
) -> None:
    """Rows `row` … of one lane. fresh: x is of this launch; past_fresh: so is the past."""
    lanes = refs.x.shape[0]
    dtype = refs.x.dtype
    row_R = row + jnp.arange(rows)
    x_R = b.load(refs.x, lane, row_R, fresh=fresh).astype(jnp.float32)
    if refs.past is not None:
        past_R = b.load(refs.past, lane, row_R, fresh=past_fresh).astype(jnp.float32)
        if refs.total is not None:
            total_R = b.load(refs.total, row_R)
        else:
            total_R = jnp.zeros((rows,), jnp.float32)
            for other in range(lanes):
                other_R = b.load(refs.past, other, row_R, fresh=past_fresh)
                total_R += other_R.astype(jnp.float32)
        due_R = b.rounded(b.rounded(total_R, dtype) - past_R, dtype)
    [y_R] = products(b, [(refs.w, (lane, row_R))], source, refs.w.shape[2], columns)
    y_R = b.rounded(y_R, dtype)
    b.store(refs.y, lane, row_R, value=y_R)
    if refs.sent is not None:
        b.store(refs.sent, lane, row_R, value=y_R)
    own_R = y_R if scale == 1 else b.rounded(y_R * scale, dtype)
    if refs.past is not None:
        own_R = b.rounded(own_R + due_R, dtype)
    b.store(refs.out, lane, row_R, value=x_R + own_R)
