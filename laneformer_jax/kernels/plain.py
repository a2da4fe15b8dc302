"""What the kernels compute, in jnp: the pieces that several references share.

Bfloat16 results are rounded where the model rounds them, and XLA may not carry more.

Shapes: L lanes of this device, D hidden, I input, O output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from laneformer_jax.norms import rms_normalise
from laneformer_jax.precision import rounded


def normed(x_LD: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`norms.RMSNorm` for a scale [D], `norms.LaneRMSNorm` for one per lane [L,D]."""
    unit_LD = rms_normalise(x_LD, eps)
    if scale.ndim == 2:
        unit_LD = rounded(unit_LD, x_LD.dtype).astype(jnp.float32)
    return rounded(unit_LD * scale.astype(jnp.float32), x_LD.dtype)


def matmul(a_LI: jax.Array, w_LOI: jax.Array) -> jax.Array:
    """Each lane's matrix times its vector, summed in float32: [L,O] in the vector's dtype."""
    out_LO = jnp.einsum("li,loi->lo", a_LI, w_LOI, preferred_element_type=jnp.float32)
    return rounded(out_LO, a_LI.dtype)


def plus(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b in a's dtype."""
    return rounded(a.astype(jnp.float32) + b.astype(jnp.float32), a.dtype)


def times(a: jax.Array, b: jax.Array | float) -> jax.Array:
    """a · b in a's dtype; b may be a float32 number."""
    return rounded(a.astype(jnp.float32) * jnp.asarray(b, jnp.float32), a.dtype)
