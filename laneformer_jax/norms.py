"""RMSNorm with one scale for all lanes or one scale per lane.

Shapes: L lanes of this device, D hidden.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax.precision import rounded


def rms_normalise(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """`weight` [D], the same for every lane. Float32 throughout, rounded once at the end."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        out = rms_normalise(x, self.eps) * self.weight[...].astype(jnp.float32)
        return rounded(out, x.dtype)


class LaneRMSNorm(nnx.Module):
    """`scale` [L, D], one per lane. The normalised value is rounded before it is scaled."""

    def __init__(self, num_lanes: int, size: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((num_lanes, size), dtype))
        self.eps = eps

    def __call__(self, x_LBSD: jax.Array) -> jax.Array:
        """[L,B,S,D] -> [L,B,S,D]."""
        x_hat_LBSD = rounded(rms_normalise(x_LBSD, self.eps), x_LBSD.dtype)
        return x_hat_LBSD * self.scale[:, None, None, :]
