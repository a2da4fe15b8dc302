"""Rounding that the compiler keeps."""

import jax
import jax.numpy as jnp


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 `x` in `dtype`, rounded here.

    A plain `astype(bfloat16)` that is read back as float32 may be dropped by XLA
    (`xla_allow_excess_precision`), and the result would depend on what the compiler happened to fuse.
    """
    if dtype == x.dtype:
        return x
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)
