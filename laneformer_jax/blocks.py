"""The two modules of a layer, for all lanes of this device at once.

Shapes: L lanes of this device, B batch, S sequence, T keys, D hidden, I and O a linear's input and output,
F feed-forward neurons of a lane, H query heads of a lane, K kv heads of a lane, d head size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax import cache as kv_cache
from laneformer_jax import rope
from laneformer_jax.attention import attend
from laneformer_jax.attention_paths import Path, Sight, self_attend
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.norms import LaneRMSNorm, RMSNorm
from laneformer_jax.precision import rounded


class LaneLinear(nnx.Module):
    """One matrix per lane, `weight` [L, O, I]; lanes hold row or column slices of one flat matrix."""

    def __init__(
        self, lanes: int, out: int, in_: int, *, fan_in: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        bound = fan_in**-0.5  # fan-in of the flat matrix, also where a lane holds only part of it
        weight = jax.random.uniform(rngs.params(), (lanes, out, in_), jnp.float32, -bound, bound)
        self.weight = nnx.Param(weight.astype(dtype))

    def __call__(self, x_LBSI: jax.Array) -> jax.Array:
        """[L,B,S,I] -> [L,B,S,O]."""
        return jnp.einsum("lbsi,loi->lbso", x_LBSI, self.weight[...])


class Context(NamedTuple):
    """What every layer of a forward pass sees beside its input."""

    cos_BSh: jax.Array
    sin_BSh: jax.Array
    mask_BST: jax.Array | None  # of this layer's kind: full or sliding; None: `sight` is enough
    sight: Sight | None = None  # without a cache


class Kind(NamedTuple):
    """What is fixed about a layer's attention when it is compiled."""

    path: Path = "plain"
    window: int | None = None


class Attention(nnx.Module):
    """Lane l owns query heads l·H/L … and kv heads l·K/L … of the flat model."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        lanes, hidden, d = config.num_lanes, config.hidden_size, config.head_size
        q = config.num_attention_heads * d // lanes
        kv = config.num_key_value_heads * d // lanes
        kw: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.wq = LaneLinear(lanes, q, hidden, fan_in=hidden, **kw)
        self.wk = LaneLinear(lanes, kv, hidden, fan_in=hidden, **kw)
        self.wv = LaneLinear(lanes, kv, hidden, fan_in=hidden, **kw)
        self.wo = LaneLinear(lanes, hidden, q, fan_in=q * lanes, **kw)
        if config.qk_norm:
            self.q_norm = RMSNorm(d, config.norm_eps, dtype)
            self.k_norm = RMSNorm(d, config.norm_eps, dtype)
        self.qk_norm = config.qk_norm
        self.head_size = d

    def projections(
        self, x_LBSD: jax.Array, cos_BSh: jax.Array, sin_BSh: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [L,B,S,H,d], keys and values [L,B,S,K,d]; queries and keys rotated."""
        heads = (*x_LBSD.shape[:3], -1, self.head_size)
        q_LBSHd = self.wq(x_LBSD).reshape(heads)
        k_LBSKd = self.wk(x_LBSD).reshape(heads)
        v_LBSKd = self.wv(x_LBSD).reshape(heads)
        if self.qk_norm:
            q_LBSHd, k_LBSKd = self.q_norm(q_LBSHd), self.k_norm(k_LBSKd)
        return (
            rope.rotate(q_LBSHd, cos_BSh, sin_BSh),
            rope.rotate(k_LBSKd, cos_BSh, sin_BSh),
            v_LBSKd,
        )

    def __call__(
        self,
        x_LBSD: jax.Array,
        context: Context,
        past: tuple[jax.Array, jax.Array, jax.Array] | None = None,
        kind: Kind = Kind(),
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Raw lane outputs [L,B,S,D], and the updated keys and values where `past` was given.

        past: a layer's cached keys and values [L,B,T,K,d] and the slot at which these tokens begin.
        """
        heads = (*x_LBSD.shape[:3], -1, self.head_size)
        q_LBSHd, k_LBTKd, v_LBTKd = self.projections(x_LBSD, context.cos_BSh, context.sin_BSh)
        updated = None
        if past is not None:
            keys, values, at = past
            k_LBTKd = kv_cache.write(keys, k_LBTKd, at)
            v_LBTKd = kv_cache.write(values, v_LBTKd, at)
            updated = (k_LBTKd, v_LBTKd)
        q_LBSKGd = q_LBSHd.reshape(*heads[:3], k_LBTKd.shape[3], -1, self.head_size)
        mask_BST, sight = context.mask_BST, context.sight
        if past is None and sight is not None:
            path, window = kind
            out_LBSKGd = self_attend(path, q_LBSKGd, k_LBTKd, v_LBTKd, sight, window, mask_BST)
        else:
            assert mask_BST is not None
            out_LBSKGd = attend(q_LBSKGd, k_LBTKd, v_LBTKd, mask_BST)
        return self.wo(out_LBSKGd.reshape(*heads[:3], -1)), updated


class MLP(nnx.Module):
    """SwiGLU: w2(silu(w1 x) · w3 x), F neurons of the flat model in each lane."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        lanes, hidden, ffn = config.num_lanes, config.hidden_size, config.intermediate_size
        kw: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.w1 = LaneLinear(lanes, ffn // lanes, hidden, fan_in=hidden, **kw)
        self.w3 = LaneLinear(lanes, ffn // lanes, hidden, fan_in=hidden, **kw)
        self.w2 = LaneLinear(lanes, hidden, ffn // lanes, fan_in=ffn, **kw)

    def __call__(self, x_LBSD: jax.Array) -> jax.Array:
        """Raw lane outputs [L,B,S,D]. The gate's silu is float32, rounded before the product."""
        gate_LBSF = rounded(jax.nn.silu(self.w1(x_LBSD).astype(jnp.float32)), x_LBSD.dtype)
        return self.w2(gate_LBSF * self.w3(x_LBSD))


def make_norm(config: LaneformerConfig, dtype: jnp.dtype) -> RMSNorm | LaneRMSNorm:
    """The norm in front of a module: one scale for all lanes, or one per lane."""
    if config.replicated_rmsn_scale:
        return RMSNorm(config.hidden_size, config.norm_eps, dtype)
    return LaneRMSNorm(config.num_lanes, config.hidden_size, config.norm_eps, dtype)


class DecoderLayer(nnx.Module):
    """Norms and modules of one layer; the residual sums between them belong to the LaneExchange."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.ffn_norm = make_norm(config, dtype)
        self.feed_forward = MLP(config, dtype, rngs)
