"""What runs on the device: prompt chunks into the cache, then a loop of tokens without the host.

Shapes: B batch, S tokens at once, T positions, v this device's part of the vocabulary, t tokens of a
burst, m log-probabilities per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from decode import sampling, speculate
from decode.sampling import Filters, Knobs, Seen
from decode.step import xla_step
from decode.steps import step_of
from decode.weights import Arrays, Layout
from laneformer_jax import compat
from laneformer_jax.cache import RingCache
from laneformer_jax.sharding import LANE, named

RUNNING, STOPPED, FULL = 0, 1, 2  # how a row stands


class Plan(NamedTuple):
    """What a burst is compiled for."""

    filters: Filters
    steps: int  # most of a burst
    draft: int = 0  # tokens proposed per step
    logits: bool = False  # return those behind every token
    kernels: str = "xla"

    @property
    def room(self) -> int:
        """Most tokens of a burst."""
        return self.steps * (self.draft + 1)


class Inputs(NamedTuple):
    """What stays as it is through a request; on the device, but small."""

    knobs: Knobs
    prompt_B: Any  # int32, length
    stops: Any  # int32, filled up with -1
    limit: Any  # int32, most new tokens of a row


class State(NamedTuple):
    """Everything that goes from one token to the next. All but the cache begins in NumPy."""

    cache: RingCache
    newest_B: Any  # int32, the token that is not in the cache yet
    made_B: Any  # int32, tokens drawn
    status_B: Any  # int32: RUNNING, STOPPED or FULL
    seen: Seen | None  # for penalties
    history_BT: Any  # int32, tokens by position, for speculation; or None


class Out(NamedTuple):
    """What a burst hands to the host."""

    count_B: Any  # int32, tokens of each row, the stop token included
    status_B: Any
    tokens_Bt: Any  # int32
    logprobs_Bt: Any  # float32, or None as what follows
    top_ids_Btm: Any
    top_logprobs_Btm: Any
    logits_BtV: Any
    proposed: Any  # int32, draft tokens that were looked at
    accepted: Any


def packed(out: Out) -> Out:
    """All counts beside the tokens in one array, since the host reads one sooner than five."""
    counts = (
        out.count_B,
        out.status_B,
        *jnp.broadcast_arrays(out.proposed, out.accepted, out.count_B)[:2],
    )
    return Out(None, None, jnp.column_stack([*counts, out.tokens_Bt]), *out[3:7], None, None)


def unpacked(out: Out) -> Out:
    """What `packed` packed, once it is there, in NumPy."""
    rest = out[3:7]
    if any(array is not None for array in rest):
        rest = jax.device_get(rest)  # all on their way before one is waited for
    packed_Bt = np.asarray(out.tokens_Bt)
    count_B, status_B, proposed_B, accepted_B = packed_Bt[:, :4].T
    return Out(count_B, status_B, packed_Bt[:, 4:], *rest, proposed_B[0], accepted_B[0])


def state_specs(state: State) -> Any:
    """How a state is spread over lane devices."""
    specs = jax.tree.map(lambda _: P(), state)
    by_vocabulary: Any = P(None, LANE)
    seen = None if state.seen is None else Seen(by_vocabulary, by_vocabulary)
    return specs._replace(cache=cache_specs(state.cache), seen=seen)


def input_specs(inputs: Inputs) -> Any:
    specs: Any = jax.tree.map(lambda _: P(), inputs)
    bias = None if inputs.knobs.bias_v is None else P(LANE)
    return specs._replace(knobs=specs.knobs._replace(bias_v=bias))


def cache_specs(cache: RingCache) -> Any:
    by_lane: Any = jax.tree.map(lambda _: P(LANE), cache)
    return by_lane._replace(length_B=P())


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def empty_cache(
    layout: Layout, positions: int, ahead: int, dtype: str, in_blocks: bool, length_B: jax.Array
) -> RingCache:
    """A cache whose rows begin at the positions `length_B`; see `RingCache.empty`."""
    config = layout.config
    cache = RingCache.empty(
        config, len(length_B), positions, ahead, jnp.dtype(dtype), config.num_lanes, in_blocks
    )._replace(length_B=length_B)
    mesh = layout.mesh
    if mesh is None:
        return cache
    shardings = jax.tree.map(lambda spec: named(mesh, spec), cache_specs(cache))
    return jax.lax.with_sharding_constraint(cache, shardings)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(layout: Layout, arrays: Arrays, cache: RingCache, ids_BS: jax.Array) -> RingCache:
    """The cache with the next S tokens of every row in it."""

    def local(arrays: Arrays, cache: RingCache, ids_BS: jax.Array) -> RingCache:
        return xla_step(layout.model(arrays), layout.lanes, ids_BS, cache)[1]

    specs = cache_specs(cache)
    return _over_lanes(layout, local, (layout.specs, specs, P()), specs)(arrays, cache, ids_BS)


def _whole_burst(
    layout: Layout, plan: Plan, arrays: Arrays, state: State, inputs: Inputs, steps: jax.Array
) -> tuple[State, Out]:
    """Up to `steps` steps, fewer when all rows are done before. What it hands out is `packed`."""
    specs = state_specs(state)
    out_specs = jax.tree.map(lambda _: P(), packed(_empty(plan, len(inputs.prompt_B))))
    if plan.logits:
        out_specs = out_specs._replace(logits_BtV=P(None, None, LANE))
    return _over_lanes(
        layout,
        partial(_burst, layout, plan),
        (layout.specs, specs, input_specs(inputs), P()),
        (specs, out_specs),
        # Pallas' interpreter does not know what differs between devices.
        checked=not plan.kernels.startswith("interpret"),
    )(arrays, state, inputs, steps)


_jit = partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
burst = _jit(_whole_burst)
_burst_over_gpus = _jit(_whole_burst, compiler_options=compat.DELAYED_SUMS)


def burst_of(layout: Layout) -> Any:
    """`burst`, as XLA must compile it for where the lanes are."""
    over_gpus = layout.mesh is not None and layout.first_device.platform == "gpu"
    return _burst_over_gpus if over_gpus else burst


def _over_lanes(
    layout: Layout, local: Any, in_specs: Any, out_specs: Any, checked: bool = True
) -> Any:
    if layout.mesh is None:
        return local
    specs = dict(in_specs=in_specs, out_specs=out_specs)
    return jax.shard_map(local, mesh=layout.mesh, **specs, check_vma=checked)


def _empty(plan: Plan, batch: int) -> Out:
    m = plan.filters.logprobs
    shape = (batch, plan.room)
    logprobs, ids, tops = None, None, None
    if m is not None:
        logprobs = jnp.zeros(shape, jnp.float32)
        ids, tops = jnp.zeros((*shape, m), jnp.int32), jnp.zeros((*shape, m), jnp.float32)
    zero = jnp.zeros((), jnp.int32)
    return Out(
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        logprobs,
        ids,
        tops,
        jnp.zeros((*shape, 1), jnp.float32) if plan.logits else None,
        zero,
        zero,
    )


def _burst(
    layout: Layout, plan: Plan, arrays: Arrays, state: State, inputs: Inputs, steps: jax.Array
) -> tuple[State, Out]:
    model, lanes, shards = layout.model(arrays), layout.lanes, layout.shards
    step = step_of(plan.kernels, layout.first_device)
    out = _empty(plan, len(inputs.prompt_B))
    if plan.logits:
        shape = (*out.tokens_Bt.shape, shards.size)
        out = out._replace(logits_BtV=lanes.enter(jnp.zeros(shape, jnp.float32)))

    def advance(
        state: State, out: Out, scratch: Any, draft_BK: jax.Array
    ) -> tuple[State, Out, Any]:
        """One pass over the weights: the newest token and its draft in, what is drawn out."""
        newest_B1 = state.newest_B[:, None]
        ids_BS = jnp.concatenate([newest_B1, jnp.maximum(draft_BK, 0)], axis=1)
        x_LBSD, cache, scratch = step.layers(model, lanes, ids_BS, state.cache, scratch)
        logits_BSv, likeliest_BS = step.head(layout, model, arrays.head, x_LBSD)
        no_draft_B1 = jnp.full_like(newest_B1, speculate.NONE)
        draft_BS = jnp.concatenate([draft_BK, no_draft_B1], axis=1)
        carry = (state, out, state.status_B == RUNNING)

        def one(carry: Any, drawn_from: Any) -> tuple[Any, None]:
            return _draw(layout, plan, inputs, *carry, *drawn_from), None

        if draft_BK.shape[1] == 0:
            likeliest_B = None if likeliest_BS is None else likeliest_BS[:, 0]
            carry, _ = one(carry, (logits_BSv[:, 0], draft_BS[:, 0], likeliest_B))
        else:
            by_token = (logits_BSv.swapaxes(0, 1), draft_BS.T)
            carry, _ = jax.lax.scan(one, carry, by_token)
        state, out, _ = carry
        # What was proposed in vain is overwritten before any query can see it.
        cache = cache._replace(length_B=inputs.prompt_B + state.made_B - 1)
        return state._replace(cache=cache), out, scratch

    def body(carry: Any) -> Any:
        i, state, out, scratch = carry
        nothing_BK = jnp.zeros((len(state.newest_B), 0), jnp.int32)
        if plan.draft == 0:
            return (i + 1, *advance(state, out, scratch, nothing_BK))
        draft_BK = speculate.propose(state.history_BT, state.cache.length_B, plan.draft)
        draft_BK = jnp.where(state.status_B[:, None] == RUNNING, draft_BK, speculate.NONE)
        # A step without a proposal is an ordinary one, at its price.
        return i + 1, *jax.lax.cond(
            jnp.any(draft_BK != speculate.NONE),
            lambda: advance(state, out, scratch, draft_BK),
            lambda: advance(state, out, scratch, nothing_BK),
        )

    def going(carry: Any) -> jax.Array:
        i, state, *_ = carry
        return (i < steps) & jnp.any(state.status_B == RUNNING)

    begin = (jnp.zeros((), jnp.int32), state, out, step.scratch(model, lanes, state.cache))
    _, state, out, _ = jax.lax.while_loop(going, body, begin)
    return state, packed(out._replace(status_B=state.status_B))


def _draw(
    layout: Layout,
    plan: Plan,
    inputs: Inputs,
    state: State,
    out: Out,
    alive_B: jax.Array,
    logits_Bv: jax.Array,
    draft_B: jax.Array,
    likeliest_B: jax.Array | None = None,
) -> tuple[State, Out, jax.Array]:
    """The next token of the rows that are alive; the rows whose draft it was stay so.

    likeliest: by the logits as they are, where a kernel has found it.
    """
    filters, knobs, shards = plan.filters, inputs.knobs, layout.shards
    row_B = jnp.arange(len(alive_B))
    position_B = inputs.prompt_B + state.made_B
    uniform_B = None
    if not filters.greedy:
        uniform_B = sampling.uniform(knobs.seed, row_B, position_B)
    raw_Bv = logits_Bv
    logits_Bv = sampling.adjusted(logits_Bv, knobs, filters, state.seen)
    if likeliest_B is not None and filters.as_they_are:
        token_B = likeliest_B
    else:
        token_B = sampling.draw(logits_Bv, uniform_B, knobs, filters, shards)

    at_B = jnp.where(alive_B, out.count_B, plan.room)  # beyond the end: dropped
    index = (row_B, at_B)
    out = out._replace(
        # One kernel on a GPU, where a scatter is three.
        tokens_Bt=jnp.where(
            jnp.arange(plan.room) == at_B[:, None], token_B[:, None], out.tokens_Bt
        ),
        count_B=out.count_B + alive_B,
    )
    if plan.draft:
        proposed_B = alive_B & (draft_B != speculate.NONE)
        accepted_B = alive_B & (draft_B == token_B)
        out = out._replace(
            proposed=out.proposed + jnp.sum(proposed_B, dtype=jnp.int32),
            accepted=out.accepted + jnp.sum(accepted_B, dtype=jnp.int32),
        )
    if plan.logits:
        out = out._replace(logits_BtV=out.logits_BtV.at[index].set(raw_Bv, mode="drop"))
    if filters.logprobs is not None:
        chosen_B, ids_Bm, top_Bm = sampling.log_probabilities(
            raw_Bv, token_B, filters.logprobs, shards
        )
        out = out._replace(
            logprobs_Bt=out.logprobs_Bt.at[index].set(chosen_B, mode="drop"),
            top_ids_Btm=out.top_ids_Btm.at[index].set(ids_Bm, mode="drop"),
            top_logprobs_Btm=out.top_logprobs_Btm.at[index].set(top_Bm, mode="drop"),
        )

    seen, history_BT = state.seen, state.history_BT
    if seen is not None:
        new_Bv = (shards.ids() == token_B[:, None]) & alive_B[:, None]
        seen = seen._replace(answer_Bv=seen.answer_Bv + new_Bv)
    if history_BT is not None:
        slot_B = jnp.where(alive_B, position_B, history_BT.shape[1])
        history_BT = history_BT.at[row_B, slot_B].set(token_B, mode="drop")
    made_B = state.made_B + alive_B
    stopped_B = jnp.any(token_B[:, None] == inputs.stops, axis=1)
    status_B = jnp.where(stopped_B, STOPPED, jnp.where(made_B >= inputs.limit, FULL, RUNNING))
    state = state._replace(
        newest_B=jnp.where(alive_B, token_B, state.newest_B),
        made_B=made_B,
        status_B=jnp.where(alive_B, status_B, state.status_B),
        seen=seen,
        history_BT=history_BT,
    )
    return state, out, alive_B & (state.status_B == RUNNING) & (draft_B == token_B)
