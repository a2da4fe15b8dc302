"""Where lanes meet: the sum across lanes, and the queue of partial outputs that arrive δ layers late.

Shapes: L lanes of this device, B batch, S sequence, D hidden.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from laneformer_jax.config import ATTENTION, MLP, LaneformerConfig
from laneformer_jax.precision import rounded


@dataclass(frozen=True)
class Lanes:
    """All `num_lanes` lanes of a model: on this device alone, or spread over the mesh axis `axis`."""

    num_lanes: int
    axis: str | None = None

    def enter(self, x: jax.Array) -> jax.Array:
        """Let an array that is equal on all lane devices take part in lane-local arithmetic."""
        if self.axis is None or self.axis in jax.typeof(x).manual_axis_type.varying:
            return x
        return jax.lax.pcast(x, self.axis, to="varying")

    def total(self, y_LBSD: jax.Array) -> jax.Array:
        """Sum over every lane: [L,B,S,D] -> float32 [B,S,D], equal on all lane devices."""
        total_BSD = jnp.sum(y_LBSD.astype(jnp.float32), axis=0)
        return jax.lax.psum(total_BSD, self.axis) if self.axis else total_BSD

    def concatenate(self, part: jax.Array) -> jax.Array:
        """The lane devices' parts of the last axis side by side, equal on all of them."""
        if self.axis is None:
            return part
        mine_n1 = (jnp.arange(jax.lax.axis_size(self.axis)) == jax.lax.axis_index(self.axis))[
            :, None
        ]
        # A sum with zeros, because only a sum is known to be equal everywhere afterwards.
        whole = jnp.where(mine_n1, part[..., None, :], 0).reshape(*part.shape[:-1], -1)
        return jax.lax.psum(whole, self.axis)


@dataclass
class LaneExchange:
    """One forward pass's traffic between lanes (spec section 2).

    `add` folds a module's lane outputs into the residual streams and queues them for the other lanes.
    Sums are float32 and rounded once to the dtype of the streams.
    """

    config: LaneformerConfig
    lanes: Lanes
    in_flight: dict[tuple[int, str], jax.Array] = field(default_factory=dict)

    def add(self, layer: int, module: str, x_LBSD: jax.Array, y_LBSD: jax.Array) -> jax.Array:
        """Residual streams after `module` of `layer`, given its raw lane outputs y. Both [L,B,S,D]."""
        cfg, dtype = self.config, x_LBSD.dtype
        if cfg.ladder_residual:
            return self._add_ladder(layer, module, x_LBSD, y_LBSD)
        sums_now, queues = cfg.sums_now(layer), cfg.queues(layer, module)
        if sums_now or queues:
            # Entered once, so that the backward pass holds one sum as well, however often it is used.
            total_BSD = rounded(self.lanes.enter(self.lanes.total(y_LBSD)), dtype)
        if queues:
            # The reference rounds the total, then takes a lane's own from it; bit for bit so here.
            self.in_flight[layer + cfg.broadcast_delay, module] = _plus(total_BSD, -y_LBSD)

        if sums_now:
            return _plus(x_LBSD, total_BSD)
        if layer < cfg.broadcast_delay or not cfg.communicates(module):
            return _plus(x_LBSD, self._scaled(y_LBSD))
        in_last_layers = layer >= cfg.num_hidden_layers - cfg.broadcast_delay
        if in_last_layers and cfg.final_own_scale == "sqrt_lanes":
            y_LBSD = self._scaled(y_LBSD)
        due_LBSD = self.in_flight.pop((layer, module), None)
        if due_LBSD is not None:
            y_LBSD = _plus(y_LBSD, due_LBSD)
        return _plus(x_LBSD, y_LBSD)

    def _add_ladder(
        self, layer: int, module: str, x_LBSD: jax.Array, y_LBSD: jax.Array
    ) -> jax.Array:
        """Ladder Residual: streams get the sum of the module before this one; the last gets both."""
        total_BSD = rounded(self.lanes.enter(self.lanes.total(y_LBSD)), x_LBSD.dtype)
        due_BSD = self.in_flight.pop((layer, module), None)
        if due_BSD is not None:
            x_LBSD = _plus(x_LBSD, due_BSD)
        following = (layer, MLP) if module == ATTENTION else (layer + 1, ATTENTION)
        if following[0] == self.config.num_hidden_layers:
            return _plus(x_LBSD, total_BSD)
        self.in_flight[following] = total_BSD
        return x_LBSD

    def _scaled(self, y_LBSD: jax.Array) -> jax.Array:
        """√L · y: the variance that L independent outputs would have had together."""
        scaled = y_LBSD.astype(jnp.float32) * math.sqrt(self.config.num_lanes)
        return rounded(scaled, y_LBSD.dtype)


def _plus(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, rounded to their dtype as the reference does at every step."""
    return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


_DRIFT_TOKENS = 16  # of a row; so many positions tell enough, and their sum across lanes is small


def drift_sample(x_LBSD: jax.Array) -> jax.Array:
    """Streams at a few positions spread over each row, float32 [L,B,s,D], without a gradient."""
    step = -(-x_LBSD.shape[2] // _DRIFT_TOKENS)
    return jax.lax.stop_gradient(x_LBSD[:, :, step - 1 :: step].astype(jnp.float32))


def drift(x_NLBSD: jax.Array, lanes: Lanes) -> jax.Array:
    """How far lanes are apart: Σ_l |x_l − mean|² / Σ_l |x_l|² over all given positions, float32 [N].

    0 when all lanes are equal, 1 − 1/L when they are orthogonal. One sum across lanes for all N.
    """
    mean_NBSD = jnp.sum(x_NLBSD, axis=1) / lanes.num_lanes
    square_N = jnp.sum(x_NLBSD * x_NLBSD, axis=(1, 2, 3, 4))
    if lanes.axis:
        mean_NBSD, square_N = jax.lax.psum((mean_NBSD, square_N), lanes.axis)
    return 1 - lanes.num_lanes * jnp.sum(mean_NBSD * mean_NBSD, axis=(1, 2, 3)) / square_N
