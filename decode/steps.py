"""From tokens to logits, in plain JAX or by the GPU kernels: what the loop of a burst calls.

Shapes: L lanes of this device, B batch, S tokens at once, D hidden, v this device's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from decode.step import xla_step
from decode.weights import Head, Layout, local_logits
from laneformer_jax.cache import RingCache
from laneformer_jax.exchange import Lanes
from laneformer_jax.model import Laneformer


class Said(NamedTuple):
    """What the head says about the next tokens."""

    logits_BSv: jax.Array  # float32; -inf for ids that may not be drawn
    likeliest_BS: jax.Array | None = None  # int32, of all devices; None: nobody has looked


class Step(Protocol):
    """One way through a model."""

    def scratch(self, model: Laneformer, lanes: Lanes, cache: RingCache) -> Any:
        """What goes from step to step beside the cache, before the first one of a burst."""

    def layers(
        self, model: Laneformer, lanes: Lanes, ids_BS: jax.Array, cache: RingCache, scratch: Any
    ) -> tuple[jax.Array, RingCache, Any]:
        """Streams [L,B,S,D], the cache with these tokens in it, and the scratch to go on with."""

    def head(self, layout: Layout, model: Laneformer, head: Head, x_LBSD: jax.Array) -> Said:
        """Logits from streams."""


class Plain:
    """XLA's own code, for every model and shape."""

    def scratch(self, model: Laneformer, lanes: Lanes, cache: RingCache) -> Any:
        return ()

    def layers(
        self, model: Laneformer, lanes: Lanes, ids_BS: jax.Array, cache: RingCache, scratch: Any
    ) -> tuple[jax.Array, RingCache, Any]:
        return *xla_step(model, lanes, ids_BS, cache), scratch

    def head(self, layout: Layout, model: Laneformer, head: Head, x_LBSD: jax.Array) -> Said:
        return Said(local_logits(layout, model, head, x_LBSD))


class ByKernels(Plain):
    """The kernels for one token of one row; several at once, and other heads, go the plain way.

    kernels: `laneformer_jax.kernels.step.Kernels`.
    """

    def __init__(self, kernels: Any):
        self.kernels = kernels

    def scratch(self, model: Laneformer, lanes: Lanes, cache: RingCache) -> Any:
        from laneformer_jax.kernels import step

        local_lanes = len(model.layers[0].attention.wq.weight)
        dtype = cache.keys[0].dtype
        scratch = step.empty_scratch(self.kernels, model.config, dtype, local_lanes)
        return jax.tree.map(lanes.enter, scratch)

    def layers(
        self, model: Laneformer, lanes: Lanes, ids_BS: jax.Array, cache: RingCache, scratch: Any
    ) -> tuple[jax.Array, RingCache, Any]:
        from laneformer_jax.kernels import step

        if ids_BS.shape != (1, 1):
            return super().layers(model, lanes, ids_BS, cache, scratch)
        x_LD, cache, scratch = step.over_cache(
            self.kernels, model, lanes, ids_BS[0, 0], cache, scratch
        )
        return x_LD[:, None, None], cache, scratch

    def head(self, layout: Layout, model: Laneformer, head: Head, x_LBSD: jax.Array) -> Said:
        from laneformer_jax.kernels import step

        if x_LBSD.shape[1:3] != (1, 1) or not step.has_head(layout.config):
            return super().head(layout, model, head, x_LBSD)
        lanes, x_LD = layout.lanes, x_LBSD[:, 0, 0]
        out = step.head_step(self.kernels, model, lanes, head.rows, x_LD, layout.vocab)
        logits_v = lanes.enter(out.logits_V.astype(jnp.float32))
        return Said(logits_v[None, None], out.token[None, None])


def step_of(kernels: str, device: Any) -> Step:
    """The step behind a name that `kernels.choose.choose` gives for a device."""
    if kernels == "xla":
        return Plain()
    from laneformer_jax.kernels import choose, step
    from laneformer_jax.kernels.backend import Backend

    table = choose.tuning(kernels, device)
    assert table is not None, kernels
    launches = kernels.removeprefix("interpret-")
    return ByKernels(step.Kernels(Backend(interpret=launches != kernels), table, launches))
