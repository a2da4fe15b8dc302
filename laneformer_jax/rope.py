"""Rotary position embedding on interleaved pairs (2i, 2i+1), in float32.

Shapes: L lanes, B batch, S sequence, N heads of a lane, d head size.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.precision import rounded


def inverse_frequencies(config: LaneformerConfig) -> np.ndarray:
    """θ^(−2i/d), float32 [d/2], with Llama-3 scaling where the config has it."""
    d = config.head_size
    freq = (1.0 / config.rope_theta ** (np.arange(0, d, 2, dtype=np.float32) / d)).astype(
        np.float32
    )
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    rotations = scaling.original_max_position_embeddings / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Between the two corners, blend linearly from fully stretched (0) to untouched (1).
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * freq / scaling.factor + keep * freq).astype(np.float32)


def angles(positions_BS: jax.Array, config: LaneformerConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every rotation, float32 [B,S,d/2] each."""
    angle = positions_BS.astype(jnp.float32)[..., None] * inverse_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_LBSNd: jax.Array, cos_BSh: jax.Array, sin_BSh: jax.Array) -> jax.Array:
    """Rotate queries or keys; computed in float32, returned in their own dtype."""
    pairs = x_LBSNd.astype(jnp.float32).reshape(*x_LBSNd.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos_BSh[:, :, None], sin_BSh[:, :, None]
    out = jnp.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1)
    return rounded(out.reshape(x_LBSNd.shape), x_LBSNd.dtype)
