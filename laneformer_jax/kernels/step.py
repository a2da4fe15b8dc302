"""One token through all layers on this device's lanes: five launches a layer, or one; two for the head.

Shapes: L lanes of this device, D hidden, T cache slots of a layer, K kv heads of a lane, d head size,
V vocabulary rows of this device, N blocks of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from laneformer_jax import rope
from laneformer_jax.blocks import DecoderLayer, LaneLinear
from laneformer_jax.cache import RingCache
from laneformer_jax.config import ATTENTION, MLP, LaneformerConfig
from laneformer_jax.exchange import Lanes
from laneformer_jax.kernels import attention, gate_up, head, plain, project, qkv
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.layer import Scratch, Weights, empty_scratch, layer
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.tuning import Tuning
from laneformer_jax.model import Laneformer
from laneformer_jax.norms import LaneRMSNorm, RMSNorm
from laneformer_jax.precision import rounded

# (model, lanes, ids [B,S], cache) -> streams [L,B,S,D] and the cache with these tokens in it.
Step = Callable[[Laneformer, Lanes, jax.Array, RingCache], tuple[jax.Array, RingCache]]


class State(NamedTuple):
    """What goes from one token to the next. Donated, all of it is updated in place."""

    keys: tuple[jax.Array, ...]  # one [L,K,T,d] per layer: a ring of the last T tokens
    values: tuple[jax.Array, ...]
    scratch: jax.Array | Scratch  # `attention.empty_counter`, or of whole layers


class Output(NamedTuple):
    """What the head says about the next token."""

    logits_V: jax.Array  # of this device's vocabulary rows, in the weights' dtype
    token: jax.Array  # int32: the likeliest of all rows, the first of equals


def empty_state(
    config: LaneformerConfig,
    slots: tuple[int, ...],
    dtype: jnp.dtype,
    local_lanes: int,
    whole_layers: Tuning | None = None,
) -> State:
    """A state without tokens, layer i with `slots[i]` cache slots: at least its window, or the longest
    context. whole_layers: with scratch for a launch per layer of that tuning."""
    heads = config.num_key_value_heads // config.num_lanes
    keys, values = (
        tuple(jnp.zeros((local_lanes, heads, t, config.head_size), dtype) for t in slots)
        for _ in range(2)
    )
    if whole_layers is None:
        return State(keys, values, attention.empty_counter(local_lanes, heads))
    lanes, d = config.num_lanes, config.head_size
    scratch = empty_scratch(
        (local_lanes, config.hidden_size),
        config.num_attention_heads // lanes,
        heads,
        d,
        config.intermediate_size // lanes,
        dtype,
        whole_layers,
    )
    return State(keys, values, scratch)


def decode_step(
    b: Backend,
    tuning: Tuning,
    model: Laneformer,
    lanes: Lanes,
    w_VD: jax.Array,
    token: jax.Array,
    position: jax.Array,
    state: State,
) -> tuple[Output, State]:
    """`layers_step` and `head_step`: from one token to the next."""
    x_LD, state = layers_step(b, tuning, model, lanes, token, position, state)
    return head_step(b, tuning, model, lanes, w_VD, x_LD), state


def layers_step(
    b: Backend,
    tuning: Tuning,
    model: Laneformer,
    lanes: Lanes,
    token: jax.Array,
    position: jax.Array,
    state: State,
) -> tuple[jax.Array, State]:
    """Residual streams [L,D] after all layers for `token` (int32), the one at `position` (int32, from 0)
    of one sequence, and the state with it.

    The same function as `Laneformer.trunk` on one token with a cache. Inside a shard_map where
    `lanes.axis` is set each device runs its lanes, and delayed sums are under way while the layers
    between run.
    """
    cfg = model.config
    row_D = jax.lax.dynamic_index_in_dim(model.tok_embeddings.weight[...], token, keepdims=False)
    local_lanes = state.keys[0].shape[0]
    x_LD = jnp.broadcast_to(lanes.enter(row_D), (local_lanes, *row_D.shape))
    cos_BSh, sin_BSh = rope.angles(position[None, None], cfg)
    angles = (cos_BSh[0, 0], sin_BSh[0, 0])
    alone = lanes.axis is not None and local_lanes == 1
    run = _Token(
        b, tuning, cfg, angles, position, _Exchange(cfg, lanes), jnp.float32 if alone else None
    )
    keys, values, scratch = list(state.keys), list(state.values), state.scratch
    for i, module in enumerate(model.layers):
        cache, w = (keys[i], values[i]), _weights(module)
        if not isinstance(scratch, Scratch):
            x_LD, keys[i], values[i], scratch = _piecewise(run, i, x_LD, w, *cache, scratch)
        elif cfg.sums_now(i):  # which no launch can wait for
            x_LD, keys[i], values[i], parts = _piecewise(run, i, x_LD, w, *cache, scratch.parts)
            scratch = scratch._replace(parts=parts)
        else:
            x_LD, keys[i], values[i], scratch = _whole(run, i, x_LD, w, *cache, scratch)
    return x_LD, State(tuple(keys), tuple(values), scratch)


class _Token(NamedTuple):
    """What all layers of one token share."""

    b: Backend
    tuning: Tuning
    config: LaneformerConfig
    angles: tuple[jax.Array, jax.Array]
    position: jax.Array
    exchange: _Exchange
    y_dtype: jnp.dtype | None  # float32 where a module's output goes straight into an all-reduce


def _piecewise(
    run: _Token,
    i: int,
    x_LD: jax.Array,
    w: Weights,
    keys_LKTd: jax.Array,
    values_LKTd: jax.Array,
    counter: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Layer i in five launches: streams, cache, counter."""
    b, t, eps, exchange = run.b, run.tuning, run.config.norm_eps, run.exchange
    q_LO, keys_LKTd, values_LKTd = qkv.qkv(
        b, x_LD, w.qkv, eps, run.angles, keys_LKTd, values_LKTd, run.position, t.qkv
    )
    window = run.config.window(i)
    heard_LO, counter = attention.attend(
        b, q_LO, keys_LKTd, values_LKTd, run.position, window, counter, t.attention
    )
    rule = exchange.rule(i, ATTENTION)
    after_LD, y_LD = project.project(
        b, x_LD, heard_LO, w.wo_LDI, rule, "attention_out", t.out, run.y_dtype
    )
    x_LD = exchange.queue(i, ATTENTION, x_LD, y_LD, after_LD)
    gated_LF = gate_up.gate_up(b, x_LD, w.gate_up, eps, t.gate_up)
    rule = exchange.rule(i, MLP)
    after_LD, y_LD = project.project(
        b, x_LD, gated_LF, w.w2_LDI, rule, "mlp_down", t.down, run.y_dtype
    )
    return exchange.queue(i, MLP, x_LD, y_LD, after_LD), keys_LKTd, values_LKTd, counter


def _whole(
    run: _Token,
    i: int,
    x_LD: jax.Array,
    w: Weights,
    keys_LKTd: jax.Array,
    values_LKTd: jax.Array,
    scratch: Scratch,
) -> tuple[jax.Array, jax.Array, jax.Array, Scratch]:
    """Layer i in one launch: streams, cache, scratch."""
    exchange = run.exchange
    out = layer(
        run.b,
        x_LD,
        w,
        run.config.norm_eps,
        run.angles,
        keys_LKTd,
        values_LKTd,
        run.position,
        run.config.window(i),
        (exchange.rule(i, ATTENTION), exchange.rule(i, MLP)),
        scratch,
        run.tuning,
        run.y_dtype,
    )
    for module, y_LD in ((ATTENTION, out.attention_LD), (MLP, out.mlp_LD)):
        x_LD = exchange.queue(i, module, x_LD, y_LD, out.x_LD)
    return x_LD, out.keys_LKTd, out.values_LKTd, out.scratch


def head_step(
    b: Backend,
    tuning: Tuning,
    model: Laneformer,
    lanes: Lanes,
    w_VD: jax.Array,
    x_LD: jax.Array,
) -> Output:
    """Final norm, lane mean, and the head `w`; over several devices each has its part of the rows.

    For models without `pre_norm_lane_agg` whose head is `replicate`.
    """
    config = model.config
    total_D = head.norm_total(b, x_LD, _scale(model.norm), config.norm_eps, tuning.norm)
    if lanes.axis:
        total_D = lanes.enter(jax.lax.psum(total_D, lanes.axis))
    logits_V, best_N, row_N = head.logits(b, total_D, config.num_lanes, w_VD, tuning.head)
    block = jnp.argmax(best_N)
    if lanes.axis is None:
        return Output(logits_V, row_N[block])
    token = row_N[block] + jax.lax.axis_index(lanes.axis) * len(logits_V)
    # Side by side over the devices; a float32 holds every row number exactly.
    both = jnp.stack([best_N[block], token.astype(jnp.float32)])[:, None]
    best_n, token_n = lanes.concatenate(both)
    return Output(logits_V, token_n[jnp.argmax(best_n)].astype(jnp.int32))


def over_cache(b: Backend, tuning: Tuning, otherwise: Step) -> Step:
    """`layers_step` as a step of the decode loop; `otherwise` takes several tokens or rows at once."""

    def run(
        model: Laneformer, lanes: Lanes, ids_BS: jax.Array, cache: RingCache
    ) -> tuple[jax.Array, RingCache]:
        if ids_BS.shape != (1, 1):
            return otherwise(model, lanes, ids_BS, cache)
        local_lanes = len(model.layers[0].attention.wq.weight[...])
        keys, values = (
            tuple(x.reshape(local_lanes, -1, *x.shape[-2:]) for x in rings) for rings in cache[:2]
        )
        counter = attention.empty_counter(*keys[0].shape[:2])
        x_LD, state = layers_step(
            b,
            tuning,
            model,
            lanes,
            ids_BS[0, 0],
            cache.length_B[0],
            State(keys, values, counter),
        )
        keys, values = (
            tuple(x.reshape(old.shape) for x, old in zip(new, rings, strict=True))
            for new, rings in zip(state[:2], cache[:2], strict=True)
        )
        return x_LD[:, None, None], RingCache(keys, values, cache.length_B + 1)

    return run


def _scale(norm: RMSNorm | LaneRMSNorm) -> jax.Array:
    return norm.scale[...] if isinstance(norm, LaneRMSNorm) else norm.weight[...]


def _weights(module: DecoderLayer) -> Weights:
    own, mlp = module.attention, module.feed_forward
    return Weights(
        qkv.Weights(_scale(module.attention_norm), *_read(own.wq, own.wk, own.wv)),
        own.wo.weight[...],
        gate_up.Weights(_scale(module.ffn_norm), *_read(mlp.w1, mlp.w3)),
        mlp.w2.weight[...],
    )


def _read(*linears: LaneLinear) -> tuple[jax.Array, ...]:
    return tuple(linear.weight[...] for linear in linears)


class _Exchange:
    """`exchange.LaneExchange`, whose sums are done by the launches of the output matrices."""

    def __init__(self, config: LaneformerConfig, lanes: Lanes):
        self.config, self.lanes = config, lanes
        self.in_flight: dict[tuple[int, str], Past] = {}

    def rule(self, layer: int, module: str) -> Rule:
        """How the output of `module` enters the streams; to ask once."""
        cfg = self.config
        early = layer < cfg.broadcast_delay
        last = layer >= cfg.num_hidden_layers - cfg.broadcast_delay
        scaled = not cfg.sums_now(layer) and (early or not cfg.communicates(module))
        scaled |= not early and last and cfg.final_own_scale == "sqrt_lanes"
        scale = math.sqrt(cfg.num_lanes) if scaled else 1.0
        return Rule(scale, self.in_flight.pop((layer, module), None))

    def queue(
        self,
        layer: int,
        module: str,
        x_LD: jax.Array,
        y_LD: jax.Array,
        after_LD: jax.Array,
    ) -> jax.Array:
        """Put raw outputs on their way. Streams after the module: `after`, or where all lanes sum at
        once, `x` and that sum."""
        cfg, lanes = self.config, self.lanes
        sums_now, queues = cfg.sums_now(layer), cfg.queues(layer, module)
        total_D = None
        if sums_now or (queues and lanes.axis):
            total_D = lanes.enter(lanes.total(y_LD))
        if queues:
            self.in_flight[layer + cfg.broadcast_delay, module] = Past(y_LD, total_D)
        if sums_now:
            assert total_D is not None
            return plain.plus(x_LD, rounded(total_D, x_LD.dtype))
        return after_LD
