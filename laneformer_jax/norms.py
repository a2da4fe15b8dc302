"""RMSNorm with one scale for all lanes or one scale per lane.

Shapes: L lanes of this device, B batch, S sequence, D hidden.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax.precision import rounded


def rms_normalise(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) over the last axis, in float32."""
    return x.astype(jnp.float32) * inverse_rms(x, eps)


class Normed(NamedTuple):
    """A float32 norm that has not been carried out: x · factor · scale.

    A linear multiplies its weight by the scale and its output by the factor, which are smaller than x:
    of [L,B,S,D] only x itself is ever written or kept.
    """

    x_LBSD: jax.Array
    factor_LBS1: jax.Array
    scale_LD: jax.Array  # or [1,D]


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """1 / sqrt(mean(x²) + eps) over the last axis, which stays with size 1; float32."""
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """`weight` [D], the same for every lane. Float32 throughout, rounded once at the end."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        out = rms_normalise(x, self.eps) * self.weight[...].astype(jnp.float32)
        return rounded(out, x.dtype)

    def pending(self, x_LBSD: jax.Array) -> Normed:
        """The norm of float32 streams, for a linear to carry out."""
        return Normed(x_LBSD, inverse_rms(x_LBSD, self.eps), self.weight[...][None])


class LaneRMSNorm(nnx.Module):
    """`scale` [L, D], one per lane. The normalised value is rounded before it is scaled."""

    def __init__(self, num_lanes: int, size: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((num_lanes, size), dtype))
        self.eps = eps

    def __call__(self, x_LBSD: jax.Array) -> jax.Array:
        """[L,B,S,D] -> [L,B,S,D]."""
        x_hat_LBSD = rounded(rms_normalise(x_LBSD, self.eps), x_LBSD.dtype)
        return x_hat_LBSD * self.scale[:, None, None, :]

    def pending(self, x_LBSD: jax.Array) -> Normed:
        """The norm of float32 streams, for a linear to carry out."""
        return Normed(x_LBSD, inverse_rms(x_LBSD, self.eps), self.scale[...])
