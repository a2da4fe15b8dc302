"""Output heads.

Shapes: L lanes of this device, B batch, S sequence, D hidden, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.exchange import Lanes


def _normal(shape: tuple[int, ...], std: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param((std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))


class ReplicateHead(nnx.Module):
    """`weight` [V, D] on the mean of the lanes."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.weight = _normal(shape, config.initializer_range, dtype, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,vd->bsv", x_BSD, self.weight[...])


class FlatLinear(nnx.Module):
    """`weight` [V, L·D], lane-major columns."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.num_lanes * config.hidden_size)
        self.weight = _normal(shape, config.initializer_range, dtype, rngs)


class LaneHead(nnx.Module):
    """One linear over the concatenated lanes; over several devices each multiplies its lanes' columns."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.linear = FlatLinear(config, dtype, rngs)

    def __call__(self, x_LBSD: jax.Array, lanes: Lanes) -> jax.Array:
        """[L,B,S,D] -> [B,S,V], equal on all lane devices."""
        num_lanes, _, _, hidden = x_LBSD.shape
        weight_VLD = self.linear.weight[...].reshape(-1, num_lanes, hidden)
        dtype = x_LBSD.dtype
        if lanes.axis is None:
            return jnp.einsum("lbsd,vld->bsv", x_LBSD, weight_VLD)
        partial_BSV = jnp.einsum(
            "lbsd,vld->bsv", x_LBSD, weight_VLD, preferred_element_type=jnp.float32
        )
        return jax.lax.psum(partial_BSV, lanes.axis).astype(dtype)


class VocabParallelHead(nnx.Module):
    """`weight` [L, V/L, D]: lane l's stream makes the logits of vocabulary rows l·V/L … ."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        lanes, hidden = config.num_lanes, config.hidden_size
        bound = hidden**-0.5
        shape = (lanes, config.vocab_size // lanes, hidden)
        weight = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
        self.weight = nnx.Param(weight.astype(dtype))

    def __call__(self, x_LBSD: jax.Array, lanes: Lanes) -> jax.Array:
        """[L,B,S,D] -> this device's rows [B,S,L·V/L]."""
        del lanes  # no lane needs another's logits here
        logits_BSLV = jnp.einsum("lbsd,lvd->bslv", x_LBSD, self.weight[...])
        return logits_BSLV.reshape(*logits_BSLV.shape[:2], -1)


def make_head(
    config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs
) -> ReplicateHead | LaneHead | VocabParallelHead | None:
    """The head that the config names; None when it is tied to the embedding."""
    if config.tie_word_embeddings:
        return None
    if config.lm_head_type == "lane":
        return LaneHead(config, dtype, rngs)
    if config.lm_head_type == "vocab_parallel":
        return VocabParallelHead(config, dtype, rngs)
    return ReplicateHead(config, dtype, rngs)
