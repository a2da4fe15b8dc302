"""The two modules of a layer, for all lanes of this device at once.

Shapes: L lanes of this device, B batch, S sequence, T keys, D hidden, I and O a linear's input and output,
F feed-forward neurons of a lane, H query heads of a lane, K kv heads of a lane, d head size.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax import rope
from laneformer_jax.attention_paths import Path, Sight, self_attend
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.norms import LaneRMSNorm, Normed, RMSNorm
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
        return _times(x_LBSI, self.weight[...])


def _times(x_LBSI: jax.Array, weight_LOI: jax.Array) -> jax.Array:
    """Each lane's product; streams that all lanes share may stand there once, [1,B,S,I]."""
    if x_LBSI.shape[0] < weight_LOI.shape[0]:
        return jnp.einsum("bsi,loi->lbso", x_LBSI[0], weight_LOI)
    # In a shard_map rows differ between devices and weights may not: the same type for both.
    missing = _differs_over(x_LBSI) - _differs_over(weight_LOI)
    if missing:
        weight_LOI = jax.lax.pcast(weight_LOI, tuple(missing), to="varying")
    return _lane_product(x_LBSI, weight_LOI)


def _differs_over(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


@jax.custom_vjp
def _lane_product(x_LBSI: jax.Array, weight_LOI: jax.Array) -> jax.Array:
    return jnp.einsum("lbsi,loi->lbso", x_LBSI, weight_LOI)


def _lane_product_forward(x_LBSI: jax.Array, weight_LOI: jax.Array) -> Any:
    return _lane_product(x_LBSI, weight_LOI), (x_LBSI, weight_LOI)


def _lane_product_backward(saved: Any, d_out_LBSO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of the weight takes both factors as they lie in memory: behind a barrier, since XLA
    would otherwise write a transposed copy of one, wherever it can join that to what made the factor."""
    x_LBSI, weight_LOI = saved
    x_LTI, d_out_LTO = jax.lax.optimization_barrier((_flat(x_LBSI), _flat(d_out_LBSO)))
    d_x_LBSI = jnp.einsum("lto,loi->lti", d_out_LTO, weight_LOI).reshape(x_LBSI.shape)
    if x_LTI.shape[-1] >= d_out_LTO.shape[-1]:
        return d_x_LBSI, jnp.einsum("lto,lti->loi", d_out_LTO, x_LTI)
    # Products of jaxlib 0.10 are faster with the smaller factor transposed; this barrier keeps XLA from
    # turning one into the other.
    d_weight_LIO = jnp.einsum("lti,lto->lio", x_LTI, d_out_LTO)
    return d_x_LBSI, jax.lax.optimization_barrier(d_weight_LIO).swapaxes(1, 2)


def _flat(x_LBSI: jax.Array) -> jax.Array:
    """Rows and tokens as one axis, [L,T,I]."""
    return x_LBSI.reshape(x_LBSI.shape[0], -1, x_LBSI.shape[-1])


_lane_product.defvjp(_lane_product_forward, _lane_product_backward)


# From so many tokens on, joining weights that read the same input costs less than reading it again.
_JOIN_FROM = 64


def apply_all(x: jax.Array | Normed, linears: Sequence[LaneLinear]) -> list[jax.Array]:
    """What each of `linears` makes of the same input [L,B,S,I], or [1,B,S,I] that all lanes share."""
    if not isinstance(x, Normed) and not all(isinstance(one, LaneLinear) for one in linears):
        return [one(x) for one in linears]  # of another precision
    streams = x.x_LBSD if isinstance(x, Normed) else x
    weights = [linear.weight[...] for linear in linears]
    cuts: list[int] = []
    if streams.shape[1] * streams.shape[2] >= _JOIN_FROM:
        cuts = list(itertools.accumulate(w.shape[1] for w in weights))[:-1]
        weights = [jnp.concatenate(weights, axis=1)]
    outs = []
    for weight in weights:
        if isinstance(x, Normed):
            outs.append(_times(x.x_LBSD, weight * x.scale_LD[:, None]) * x.factor_LBS1)
        else:
            outs.append(_times(x, weight))
    return jnp.split(outs[0], cuts, axis=-1) if cuts else outs


class Context(NamedTuple):
    """What every layer of a forward pass sees beside its input."""

    cos_BSh: jax.Array
    sin_BSh: jax.Array
    mask_BST: jax.Array | None  # of this layer's kind: full or sliding; None: `sight` is enough
    sight: Sight


class Kind(NamedTuple):
    """What is fixed about a layer's attention when it is compiled."""

    path: Path = "plain"
    window: int | None = None


_PLAIN = Kind()


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
        q, k, v = apply_all(x_LBSD, (self.wq, self.wk, self.wv))
        heads = (*q.shape[:3], -1, self.head_size)
        q_LBSHd, k_LBSKd, v_LBSKd = q.reshape(heads), k.reshape(heads), v.reshape(heads)
        if self.qk_norm:
            q_LBSHd, k_LBSKd = self.q_norm(q_LBSHd), self.k_norm(k_LBSKd)
        return (
            rope.rotate(q_LBSHd, cos_BSh, sin_BSh),
            rope.rotate(k_LBSKd, cos_BSh, sin_BSh),
            v_LBSKd,
        )

    def __call__(self, x_LBSD: jax.Array, context: Context, kind: Kind) -> jax.Array:
        """Raw lane outputs [L,B,S,D]."""
        q_LBSHd, k_LBSKd, v_LBSKd = self.projections(x_LBSD, context.cos_BSh, context.sin_BSh)
        shape = q_LBSHd.shape[:3]  # all lanes, also where x is one for all
        q_LBSKGd = q_LBSHd.reshape(*shape, k_LBSKd.shape[3], -1, self.head_size)
        path, window = kind
        out_LBSKGd = self_attend(
            path, q_LBSKGd, k_LBSKd, v_LBSKd, context.sight, window, context.mask_BST
        )
        return self.wo(out_LBSKGd.reshape(*shape, -1))


class MLP(nnx.Module):
    """SwiGLU: w2(silu(w1 x) · w3 x), F neurons of the flat model in each lane."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        lanes, hidden, ffn = config.num_lanes, config.hidden_size, config.intermediate_size
        kw: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.w1 = LaneLinear(lanes, ffn // lanes, hidden, fan_in=hidden, **kw)
        self.w3 = LaneLinear(lanes, ffn // lanes, hidden, fan_in=hidden, **kw)
        self.w2 = LaneLinear(lanes, hidden, ffn // lanes, fan_in=ffn, **kw)

    def __call__(self, x_LBSD: jax.Array | Normed) -> jax.Array:
        """Raw lane outputs [L,B,S,D]. The gate's silu is float32, rounded before the product."""
        gate_LBSF, up_LBSF = apply_all(x_LBSD, (self.w1, self.w3))
        gate_LBSF = rounded(jax.nn.silu(gate_LBSF.astype(jnp.float32)), up_LBSF.dtype)
        return self.w2(gate_LBSF * up_LBSF)


def make_norm(config: LaneformerConfig, dtype: jnp.dtype) -> RMSNorm | LaneRMSNorm:
    """The norm in front of a module: one scale for all lanes, or one per lane."""
    if config.replicated_rmsn_scale:
        return RMSNorm(config.hidden_size, config.norm_eps, dtype)
    return LaneRMSNorm(config.num_lanes, config.hidden_size, config.norm_eps, dtype)


def normed(norm: RMSNorm | LaneRMSNorm, x_LBSD: jax.Array) -> jax.Array | Normed:
    """The norm in front of a module. In float32 its linears carry it out; other dtypes are rounded
    between norm and linear, where the reference rounds."""
    return norm.pending(x_LBSD) if x_LBSD.dtype == jnp.float32 else norm(x_LBSD)


class DecoderLayer(nnx.Module):
    """Norms and modules of one layer; the residual sums between them belong to the LaneExchange."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.ffn_norm = make_norm(config, dtype)
        self.feed_forward = MLP(config, dtype, rngs)
