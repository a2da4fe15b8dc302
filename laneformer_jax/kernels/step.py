"""One token through all layers on this device's lanes: five launches a layer, one, or one for all layers;
and two for the head.

Shapes: L lanes of this device, D hidden, T cache slots of a layer, K kv heads of a lane, d head size,
V vocabulary rows of this device, N blocks of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from laneformer_jax import rope
from laneformer_jax.blocks import DecoderLayer, LaneLinear
from laneformer_jax.cache import RingCache
from laneformer_jax.config import ATTENTION, MLP, LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.exchange import Lanes
from laneformer_jax.kernels import attention, gate_up, head, plain, project, qkv
from laneformer_jax.kernels import layer as whole
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.choose import unsupported
from laneformer_jax.kernels.layer import Earlier, Layer, Scratch, Weights
from laneformer_jax.kernels.project import Past, Projected, Rule
from laneformer_jax.kernels.tuning import Tuning
from laneformer_jax.model import Laneformer
from laneformer_jax.norms import LaneRMSNorm, RMSNorm
from laneformer_jax.precision import rounded


@dataclass(frozen=True)
class Kernels:
    """What runs a token. launches: "fused" is one for each operation of a layer, "layer" one for a layer,
    "token" one for all layers, for which all lanes must be on this device."""

    backend: Backend
    tuning: Tuning
    launches: str = "fused"


class State(NamedTuple):
    """What goes from one token to the next. Donated, all of it is updated in place."""

    keys: tuple[jax.Array, ...]  # one [L,K,T,d] per layer: a ring of the last T tokens
    values: tuple[jax.Array, ...]
    scratch: jax.Array | Scratch  # see `empty_scratch`


class Output(NamedTuple):
    """What the head says about the next token."""

    logits_V: jax.Array  # of this device's vocabulary rows, in the weights' dtype
    token: jax.Array  # int32: the likeliest of all rows, the first of equals


def empty_state(
    kernels: Kernels,
    config: LaneformerConfig,
    slots: tuple[int, ...],
    dtype: jnp.dtype,
    local_lanes: int,
) -> State:
    """A state without tokens, layer i with `slots[i]` cache slots: at least its window, or the longest
    context."""
    heads = config.num_key_value_heads // config.num_lanes
    keys, values = (
        tuple(jnp.zeros((local_lanes, heads, t, config.head_size), dtype) for t in slots)
        for _ in range(2)
    )
    return State(keys, values, empty_scratch(kernels, config, dtype, local_lanes))


def empty_scratch(
    kernels: Kernels, config: LaneformerConfig, dtype: jnp.dtype, local_lanes: int
) -> jax.Array | Scratch:
    """Scratch for a first token: `attention.empty_counter`, or that of whole layers."""
    lanes = config.num_lanes
    kv_heads = config.num_key_value_heads // lanes
    if kernels.launches == "fused":
        return attention.empty_counter(local_lanes, kv_heads)
    return whole.empty_scratch(
        local_lanes,
        config.num_attention_heads // lanes,
        kv_heads,
        config.head_size,
        config.intermediate_size // lanes,
        dtype,
        kernels.tuning,
    )


def decode_step(
    kernels: Kernels,
    model: Laneformer,
    lanes: Lanes,
    w_VD: jax.Array,
    token: jax.Array,
    position: jax.Array,
    state: State,
) -> tuple[Output, State]:
    """`layers_step` and `head_step`: from one token to the next."""
    x_LD, state = layers_step(kernels, model, lanes, token, position, state)
    return head_step(kernels, model, lanes, w_VD, x_LD), state


def layers_step(
    kernels: Kernels,
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

    Raises:
        UserError: a model that these kernels cannot run; see `choose.unsupported`.
    """
    cfg = model.config
    reason = unsupported(cfg, kernels.launches, alone=lanes.axis is None)
    if reason is not None:
        raise UserError(f"kernels: {kernels.launches!r} cannot run: {reason}")
    row_D = jax.lax.dynamic_index_in_dim(model.tok_embeddings.weight[...], token, keepdims=False)
    local_lanes = state.keys[0].shape[0]
    x_LD = jnp.broadcast_to(lanes.enter(row_D), (local_lanes, *row_D.shape))
    cos_BSh, sin_BSh = rope.angles(position[None, None], cfg)
    angles = (cos_BSh[0, 0], sin_BSh[0, 0])
    run = _Token(
        kernels.backend,
        kernels.tuning,
        cfg,
        angles,
        position,
        _Exchange(cfg, lanes),
        send=lanes.axis is not None and local_lanes == 1,
    )
    keys, values, scratch = list(state.keys), list(state.values), state.scratch
    weights = [_weights(module) for module in model.layers]
    if kernels.launches == "token":
        return _at_once(run, x_LD, weights, state)
    for i, w in enumerate(weights):
        cache = (keys[i], values[i])
        if not isinstance(scratch, Scratch):
            x_LD, keys[i], values[i], scratch = _piecewise(run, i, x_LD, w, *cache, scratch)
        elif cfg.sums_now(i):  # which no launch can wait for
            x_LD, keys[i], values[i], counters = _piecewise(
                run, i, x_LD, w, *cache, scratch.counters
            )
            scratch = scratch._replace(counters=counters)
        else:
            x_LD, keys[i], values[i], scratch = _whole(run, i, x_LD, w, *cache, scratch)
    return x_LD, State(tuple(keys), tuple(values), scratch)


@dataclass(frozen=True)
class _Token:
    """What the layers of one token have in common."""

    b: Backend
    tuning: Tuning
    config: LaneformerConfig
    angles: tuple[jax.Array, jax.Array]
    position: jax.Array
    exchange: _Exchange
    send: bool  # a module's output goes straight into a sum over devices


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
    made = project.project(b, x_LD, heard_LO, w.wo_LDI, rule, "attention_out", t.out, run.send)
    x_LD = exchange.queue(i, ATTENTION, x_LD, made)
    gated_LF = gate_up.gate_up(b, x_LD, w.gate_up, eps, t.gate_up)
    rule = exchange.rule(i, MLP)
    made = project.project(b, x_LD, gated_LF, w.w2_LDI, rule, "mlp_down", t.down, run.send)
    return exchange.queue(i, MLP, x_LD, made), keys_LKTd, values_LKTd, counter


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
    rules = (exchange.rule(i, ATTENTION), exchange.rule(i, MLP))
    one = Layer(w, keys_LKTd, values_LKTd, run.config.window(i), rules)
    out = _launch(run, x_LD, [one], scratch, "layer")
    made = out.made[0]
    for module, y_LD, sent_LD in (
        (ATTENTION, made.attention_LD, made.attention_sent_LD),
        (MLP, made.mlp_LD, made.mlp_sent_LD),
    ):
        x_LD = exchange.queue(i, module, x_LD, Projected(out.x_LD, y_LD, sent_LD))
    return x_LD, made.keys_LKTd, made.values_LKTd, out.scratch


def _at_once(
    run: _Token, x_LD: jax.Array, weights: list[Weights], state: State
) -> tuple[jax.Array, State]:
    """All layers in one launch."""
    exchange, layers = run.exchange, []
    for i, w in enumerate(weights):
        rules = []
        for number, module in enumerate((ATTENTION, MLP)):
            rules.append(exchange.rule(i, module))
            exchange.queue_earlier(i, module, Earlier(i, number))
        window = run.config.window(i)
        layers.append(Layer(w, state.keys[i], state.values[i], window, (rules[0], rules[1])))
    assert isinstance(state.scratch, Scratch)
    out = _launch(run, x_LD, layers, state.scratch, "token")
    keys, values = (tuple(rings) for rings in zip(*(one[2:4] for one in out.made), strict=True))
    return out.x_LD, State(keys, values, out.scratch)


def _launch(
    run: _Token, x_LD: jax.Array, layers: list[Layer], scratch: Scratch, name: str
) -> whole.Output:
    eps, rest = run.config.norm_eps, (run.angles, run.position, scratch, run.tuning, name)
    return whole.run_layers(run.b, x_LD, layers, eps, *rest, run.send)


def head_step(
    kernels: Kernels,
    model: Laneformer,
    lanes: Lanes,
    w_VD: jax.Array,
    x_LD: jax.Array,
    vocab: int | None = None,
) -> Output:
    """Final norm, lane mean, and the head `w`; over several devices each has its part of the rows.

    For models of which `has_head` is true. vocab: ids that may be drawn, the first so many; the logits of
    others are -inf.
    """
    b, config, tuning = kernels.backend, model.config, kernels.tuning
    total_D = head.norm_total(b, x_LD, _scale(model.norm), config.norm_eps, tuning.norm)
    first = jnp.zeros((), jnp.int32)
    if lanes.axis:
        total_D = lanes.enter(jax.lax.psum(total_D, lanes.axis))
        first = jax.lax.axis_index(lanes.axis).astype(jnp.int32) * len(w_VD)
    logits_V, best_N, id_N = head.logits(
        b, total_D, config.num_lanes, w_VD, tuning.head, first, vocab or config.vocab_size
    )
    block = jnp.argmax(best_N)
    if lanes.axis is None:
        return Output(logits_V, id_N[block])
    # Side by side over the devices; a float32 holds every row number exactly.
    both = jnp.stack([best_N[block], id_N[block].astype(jnp.float32)])[:, None]
    best_n, token_n = lanes.concatenate(both)
    return Output(logits_V, token_n[jnp.argmax(best_n)].astype(jnp.int32))


def has_head(config: LaneformerConfig) -> bool:
    """Whether `head_step` makes the logits of a model."""
    return config.lm_head_type == "replicate" and not config.pre_norm_lane_agg


def over_cache(
    kernels: Kernels,
    model: Laneformer,
    lanes: Lanes,
    token: jax.Array,
    cache: RingCache,
    scratch: jax.Array | Scratch,
) -> tuple[jax.Array, RingCache, jax.Array | Scratch]:
    """`layers_step` on the decode engine's cache of one row: streams [L,D], cache, scratch."""
    local_lanes = len(model.layers[0].attention.wq.weight[...])
    keys, values = (
        tuple(x.reshape(local_lanes, -1, *x.shape[-2:]) for x in rings) for rings in cache[:2]
    )
    x_LD, state = layers_step(
        kernels, model, lanes, token, cache.length_B[0], State(keys, values, scratch)
    )
    keys, values = (
        tuple(x.reshape(old.shape) for x, old in zip(new, rings, strict=True))
        for new, rings in zip(state[:2], cache[:2], strict=True)
    )
    return x_LD, RingCache(keys, values, cache.length_B + 1), state.scratch


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

    def queue_earlier(self, layer: int, module: str, y: Earlier) -> None:
        """As `queue`, for a launch of several layers on the one device with all lanes."""
        if self.config.queues(layer, module):
            self.in_flight[layer + self.config.broadcast_delay, module] = Past(y)

    def queue(self, layer: int, module: str, x_LD: jax.Array, made: Projected) -> jax.Array:
        """Put raw outputs on their way. Streams after the module: those made, or where all lanes sum at
        once, `x` and that sum."""
        cfg, lanes = self.config, self.lanes
        sums_now, queues = cfg.sums_now(layer), cfg.queues(layer, module)
        total_D = None
        if sums_now or (queues and lanes.axis):
            y_LD = made.y_LD if made.sent_LD is None else made.sent_LD
            total_D = lanes.enter(lanes.total(y_LD))
        if queues:
            self.in_flight[layer + cfg.broadcast_delay, module] = Past(made.y_LD, total_D)
        if sums_now:
            assert total_D is not None
            return plain.plus(x_LD, rounded(total_D, x_LD.dtype))
        return made.x_LD
