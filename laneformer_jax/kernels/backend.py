"""The one module that calls Pallas: how a kernel is launched, and what the code inside may use.

Kernels are written in jnp, lax and the methods of `Backend`; a successor to Pallas' Triton lowering is
another class with these methods. A kernel sees whole arrays and indexes them by integers and integer
arrays, never by slices: that is what both the interpreter and the GPU do without moving the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from laneformer_jax.compat import JAX_VERSION
from laneformer_jax.kernels.tuning import Launch
from laneformer_jax.precision import rounded as reduced

# How to read, past the first cache, what other programs of the same launch wrote.
_FRESH: dict[str, Any] = (
    dict(cache_modifier=".cg") if JAX_VERSION >= (0, 12) else dict(volatile=True)
)

Ref = Any  # an array in the GPU's memory, as a kernel sees it


@dataclass(frozen=True)
class Backend:
    """Pallas through Triton. With `interpret` kernels run on the CPU, one program after another."""

    interpret: bool = False

    def launch(
        self,
        kernel: Callable[..., None],
        name: str,
        grid: tuple[int, ...],
        inputs: Sequence[jax.Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
        how: Launch,
        in_place: Mapping[int, int] | None = None,
    ) -> Sequence[jax.Array]:
        """Run `kernel(*input_refs, *output_refs)` once for every point of `grid`.

        in_place: input number -> output number that is the same memory. The kernel must touch it through
        the output's reference.
        """

        # Inside a shard_map outputs differ between devices where any input does.
        axes = max((jax.typeof(x).manual_axis_type for x in inputs), key=lambda a: len(a.varying))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in outputs]
        if self.interpret:
            where: dict[str, Any] = dict(interpret=True)
        else:
            params = pltriton.CompilerParams(num_warps=how.warps, num_stages=how.stages)
            where = dict(compiler_params=params)
        call = pl.pallas_call(
            kernel,
            out_shape=shapes,
            grid=grid,
            input_output_aliases=dict(in_place or {}),
            name=name,
            **where,
        )
        return call(*inputs)

    # Inside a kernel ------------------------------------------------------------------------

    def load(
        self, ref: Ref, *index: Any, mask: Any = None, fresh: bool = False, once: bool = False
    ) -> jax.Array:
        """ref[index]; zeros where `mask` is False.

        fresh: other programs of this launch may have written it. once: nobody reads it again.
        """
        extra: dict[str, Any] = {}
        if mask is not None:
            shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
            extra = dict(mask=jnp.broadcast_to(mask, shape), other=jnp.zeros((), ref.dtype))
        if not self.interpret:
            extra |= _FRESH if fresh else dict(eviction_policy="evict_first") if once else {}
        return pltriton.load(ref.at[_indices(index)], **extra)

    def store(self, ref: Ref, *index: Any, value: jax.Array, mask: Any = None) -> None:
        """ref[index] = value, in ref's dtype, where `mask` is True."""
        if mask is not None:
            mask = jnp.broadcast_to(mask, value.shape)
        pltriton.store(ref.at[_indices(index)], value.astype(ref.dtype), mask=mask)

    def rounded(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Float32 `x` as float32 with `dtype`'s precision. Triton keeps the two conversions; XLA, which
        runs the interpreter, need not."""
        if self.interpret:
            return reduced(x, dtype).astype(jnp.float32)
        return x.astype(dtype).astype(jnp.float32)

    def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Float32 a @ b of two tiles; float32 tiles are not rounded to TensorFloat-32."""
        precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)

    def fetch_add(self, ref: Ref, index: Any, amount: int) -> jax.Array:
        """Add to int32 ref[index] and return what was there; ordered against all other memory
        accesses of the calling thread, both ways."""
        at = jnp.asarray(index, jnp.int32)
        if self.interpret:  # its rule knows arrays of indices only
            return pltriton.atomic_add(ref, (at[None],), jnp.full(1, amount, jnp.int32))[0]
        return pltriton.atomic_add(ref, (at,), jnp.int32(amount))

    def sync_threads(self) -> None:
        """All threads of this program meet."""
        if not self.interpret:
            pltriton.debug_barrier()

    def sync_programs(self, counters: Ref, first: int, programs: int) -> None:
        """All programs of this launch meet; all of them must fit on the GPU at once.

        counters: int32, of which two from `first` on are zeros at launch; the first of them grows by
        `programs` at every meeting, and `end_meetings` puts it back. The interpreter runs one program after
        another, so that only one can meet.
        """
        if self.interpret and programs > 1:
            raise NotImplementedError("programs that run one after another cannot meet")
        self.sync_threads()
        ticket = self.fetch_add(counters, first, 1)
        all_here = ticket - lax.rem(ticket, jnp.int32(programs)) + programs
        # By an atomic, since JAX deletes a loop that only reads.
        lax.while_loop(
            lambda here: here < all_here, lambda _: self.fetch_add(counters, first, 0), ticket + 1
        )
        self.sync_threads()

    def end_meetings(self, counters: Ref, first: int, programs: int) -> None:
        """After the last `sync_programs` of a launch: zeros for the next one.

        By the last program that comes here: then none waits for the counter any more.
        """
        self.sync_threads()
        done = self.fetch_add(counters, first + 1, 1)

        @when(done == programs - 1)
        def last() -> None:
            self.store(counters, first, value=jnp.int32(0))
            self.store(counters, first + 1, value=jnp.int32(0))


def _indices(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The interpreter knows no Python numbers."""
    return tuple(jnp.int32(i) if isinstance(i, int) else i for i in index)


def program(axis: int) -> jax.Array:
    """This program's place in the grid."""
    return pl.program_id(axis)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`@when(condition)` runs the function it decorates only where the condition holds."""
    return pl.when(condition)
