"""The end of a token: final norm, lane mean, output head, and the likeliest token.

Shapes: L lanes of this device, D hidden, V vocabulary rows of this device, R rows of a program, N programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from laneformer_jax.kernels import plain
from laneformer_jax.kernels.backend import Backend, Ref, program
from laneformer_jax.kernels.rows import Normed, Tile, Vector, products
from laneformer_jax.kernels.tuning import Rows, block
from laneformer_jax.precision import rounded


def norm_total_reference(x_LD: jax.Array, norm: jax.Array, eps: float) -> jax.Array:
    """Sum over these lanes of their normalised streams, float32 [D]."""
    return jnp.sum(plain.normed(x_LD, norm, eps).astype(jnp.float32), axis=0)


def norm_total(b: Backend, x_LD: jax.Array, norm: jax.Array, eps: float, blocks: Rows) -> jax.Array:
    """As `norm_total_reference`, in one launch."""
    lanes, hidden = x_LD.shape
    rows = block(hidden, blocks.rows)

    def kernel(x_ref: Ref, norm_ref: Ref, out_ref: Ref) -> None:
        row = program(0) * rows
        total_R = jnp.zeros((rows,), jnp.float32)
        for lane in range(lanes):
            source = Normed(Vector(x_ref, lane), norm_ref, eps)
            total_R += source.prepare(b, hidden, block(hidden, blocks.columns), rows)(row)
        b.store(out_ref, row + jnp.arange(rows), value=total_R)

    [total_D] = b.launch(
        kernel,
        "final_norm",
        (hidden // rows,),
        [x_LD, norm],
        [jax.ShapeDtypeStruct((hidden,), jnp.float32)],
        blocks.launch,
    )
    return total_D


def logits_reference(total_D: jax.Array, num_lanes: int, w_VD: jax.Array) -> jax.Array:
    """Logits [V] of the mean over `num_lanes` lanes, in the weights' dtype."""
    mean_D = rounded(total_D / num_lanes, w_VD.dtype)
    return plain.matmul(mean_D[None], w_VD[None])[0]


def logits(
    b: Backend,
    total_D: jax.Array,
    num_lanes: int,
    w_VD: jax.Array,
    blocks: Rows,
    first: jax.Array,
    ids: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `logits_reference`, in one launch that also looks for the likeliest token.

    first: int32, the id of row 0; ids: how many there are, so that rows behind them get -inf.

    Returns:
        logits [V] in the weights' dtype; and for each of N blocks of rows its highest logit, float32 [N],
        and the first id that has it, int32 [N].
    """
    vocab, hidden = w_VD.shape
    rows = block(vocab, blocks.rows)
    programs = vocab // rows

    def kernel(
        first_ref: Ref, total_ref: Ref, w_ref: Ref, logits_ref: Ref, best_ref: Ref, id_ref: Ref
    ) -> None:
        row_R = program(0) * rows + jnp.arange(rows)
        source = Mean(total_ref, num_lanes, w_ref.dtype)
        [logit_R] = products(b, [(w_ref, (row_R,))], source, hidden, blocks.columns)
        id_R = b.load(first_ref, 0) + row_R
        logit_R = jnp.where(id_R < ids, b.rounded(logit_R, w_ref.dtype), -jnp.inf)
        b.store(logits_ref, row_R, value=logit_R)
        best = jnp.max(logit_R)
        b.store(best_ref, program(0), value=best)
        likeliest = jnp.min(jnp.where(logit_R == best, id_R, jnp.iinfo(jnp.int32).max))
        b.store(id_ref, program(0), value=likeliest)

    logits_V, best_N, id_N = b.launch(
        kernel,
        "head",
        (programs,),
        [jnp.reshape(first, 1), total_D, w_VD],
        [
            jax.ShapeDtypeStruct((vocab,), w_VD.dtype),
            jax.ShapeDtypeStruct((programs,), jnp.float32),
            jax.ShapeDtypeStruct((programs,), jnp.int32),
        ],
        blocks.launch,
    )
    return logits_V, best_N, id_N


@dataclass(frozen=True)
class Mean:
    """The sum `total` [D] over `num_lanes` lanes as their mean, rounded to `dtype`."""

    total: Ref
    num_lanes: int
    dtype: Any

    def prepare(self, b: Backend, size: int, columns: int) -> Tile:
        column_C = jnp.arange(columns)

        def tile(start: Any) -> jax.Array:
            return b.rounded(b.load(self.total, start + column_C) / self.num_lanes, self.dtype)

        return tile
