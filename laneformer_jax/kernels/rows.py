"""Matrix-vector products of some rows, and the vectors that they multiply.

Shapes: L lanes of this device, I input, R rows of a program, C columns read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from laneformer_jax.kernels.backend import Backend, Ref
from laneformer_jax.kernels.tuning import block

# So many tiles of a row are asked for at once, before the vector is ready.
_AT_ONCE = 4

Tile = Callable[[Any], jax.Array]  # first column -> float32 [C]


class Source(Protocol):
    """A vector that matrix rows are multiplied with."""

    def prepare(self, b: Backend, size: int, columns: int) -> Tile:
        """What gives the vector's tiles; called once, after the matrix has been asked for."""
        ...


@dataclass(frozen=True)
class Vector:
    """Lane `lane` of `ref` [L, I]. fresh: written during this launch."""

    ref: Ref
    lane: Any
    fresh: bool = False

    def prepare(self, b: Backend, size: int, columns: int) -> Tile:
        column_C = jnp.arange(columns)

        def tile(start: Any) -> jax.Array:
            x_C = b.load(self.ref, self.lane, start + column_C, fresh=self.fresh)
            return x_C.astype(jnp.float32)

        return tile


@dataclass(frozen=True)
class Normed:
    """RMSNorm of `vector` under `scale` [I], or [L, I] with a scale per lane.

    Rounded where `norms.RMSNorm` and `norms.LaneRMSNorm` round, to the dtype of the vector.
    """

    vector: Vector
    scale: Ref
    eps: float

    def prepare(self, b: Backend, size: int, columns: int, width: int | None = None) -> Tile:
        """What gives the vector's tiles of `width` (default `columns`); its norm is taken here."""
        read = self.vector.prepare(b, size, columns)
        squares_C = _over_tiles(size, columns, lambda start: jnp.square(read(start)))
        inverse = lax.rsqrt(jnp.sum(squares_C) * (1.0 / size) + self.eps)
        width = width or columns
        raw = self.vector.prepare(b, size, width)
        dtype, per_lane = self.vector.ref.dtype, len(self.scale.shape) == 2
        column_C = jnp.arange(width)

        def tile(start: Any) -> jax.Array:
            unit_C = raw(start) * inverse
            if per_lane:
                unit_C = b.rounded(unit_C, dtype)
                scale_C = b.load(self.scale, self.vector.lane, start + column_C)
            else:
                scale_C = b.load(self.scale, start + column_C)
            return b.rounded(unit_C * scale_C.astype(jnp.float32), dtype)

        return tile


def products(
    b: Backend,
    weights: Sequence[tuple[Ref, tuple[Any, ...]]],
    source: Source,
    size: int,
    columns: int,
) -> list[jax.Array]:
    """Float32 [R] = W[rows] @ source, for every (W, index of its rows).

    The index is what stands before the column: `(lane, row_R)` for [L,O,I], `(row_R,)` for [O,I].
    """
    columns = block(size, columns)
    column_1C = jnp.arange(columns)[None]

    def tiles(start: Any) -> list[jax.Array]:
        return [
            b.load(ref, *index[:-1], index[-1][:, None], start + column_1C, once=True)
            for ref, index in weights
        ]

    def add(sums: list[jax.Array], tiles: list[jax.Array], x_C: jax.Array) -> list[jax.Array]:
        return [s + w.astype(jnp.float32) * x_C[None] for s, w in zip(sums, tiles, strict=True)]

    sums = [jnp.zeros((index[-1].shape[0], columns), jnp.float32) for _, index in weights]
    starts = range(0, size, columns)
    if len(starts) <= _AT_ONCE:
        read = [tiles(start) for start in starts]  # under way while the vector is normalised
        vector = source.prepare(b, size, columns)
        for start, loaded in zip(starts, read, strict=True):
            sums = add(sums, loaded, vector(start))
    else:
        vector = source.prepare(b, size, columns)
        sums = lax.fori_loop(
            0,
            len(starts),
            lambda i, sums: add(sums, tiles(i * columns), vector(i * columns)),
            sums,
        )
    return [jnp.sum(s, axis=1) for s in sums]


def _over_tiles(size: int, columns: int, value: Tile) -> jax.Array:
    """Sum of `value` over a vector's tiles, [C]."""
    starts = range(0, size, columns)
    if len(starts) <= _AT_ONCE:
        total_C = value(0)
        for start in starts[1:]:
            total_C = total_C + value(start)
        return total_C
    return lax.fori_loop(
        0,
        len(starts),
        lambda i, total_C: total_C + value(i * columns),
        jnp.zeros((columns,), jnp.float32),
    )
