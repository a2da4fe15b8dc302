"""Cached generation: prefill, then bursts of tokens without a host round trip in between.

Shapes: B batch, P prompt length, V vocabulary.
"""

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from laneformer_jax.cache import KVCache
from laneformer_jax.errors import UserError
from laneformer_jax.exchange import Lanes
from laneformer_jax.inputs import as_array
from laneformer_jax.model import Laneformer, parameter_specs
from laneformer_jax.sharding import LANE, named

BURST = 16
# Beyond these, float32 logits divided by the temperature overflow, or all tokens are equally likely.
COLDEST, HOTTEST = 1e-6, 1e6


@dataclass(frozen=True)
class Generation:
    """What `generate` returns."""

    tokens: np.ndarray  # int32 [B, new]; after a row's end token, that token again
    logits: np.ndarray | None = None  # float32 [B, new, V]: logits[:, t] chose tokens[:, t]


class State(NamedTuple):
    """Everything that goes from one token to the next, on the device."""

    cache: KVCache
    logits_BV: jax.Array  # of the token to come
    position_B: jax.Array  # of the token to come
    done_B: jax.Array
    key: jax.Array


class Options(TypedDict, total=False):
    """What both `generate` and `stream` take besides.

    eos_token_id: a row ends with this token, and the call when all rows have; None (default): never.
    seed: of the draws at a temperature above 0 (default 0).
    prefill_chunk: prompt tokens per prefill step; None (default): all at once.
    overflow: when prompt and new tokens exceed `max_position_embeddings`, `refuse` (default) or `cut`
        the number of new tokens.
    """

    eos_token_id: int | None
    seed: int
    prefill_chunk: int | None
    overflow: Literal["refuse", "cut"]


def generate(
    model: Laneformer,
    prompt_ids: Any,
    max_new_tokens: int,
    temperature: float = 0.0,
    attention_mask: Any = None,
    *,
    return_logits: bool = False,
    **options: Unpack[Options],
) -> Generation:
    """Continue every prompt by up to `max_new_tokens` tokens.

    Args:
        prompt_ids: int [B, P]. Shorter prompts are padded on the left, and
        attention_mask: int or bool [B, P] is 0 there.
        temperature: 0 takes the likeliest token, above 0 samples.
        return_logits: also return the logits behind every token.
        options: see `Options`.

    Raises:
        UserError: an empty or badly padded prompt, ids outside the vocabulary, no room in the context.
    """
    bursts = list(
        _bursts(
            model,
            prompt_ids,
            max_new_tokens,
            temperature,
            attention_mask,
            return_logits,
            **options,
        )
    )
    tokens = np.concatenate([tokens for tokens, _ in bursts], axis=1)
    if not return_logits:
        return Generation(tokens)
    return Generation(tokens, np.concatenate([logits for _, logits in bursts], axis=1))


def stream(
    model: Laneformer,
    prompt_ids: Any,
    max_new_tokens: int,
    temperature: float = 0.0,
    attention_mask: Any = None,
    **options: Unpack[Options],
) -> Iterator[np.ndarray]:
    """As `generate`, yielding int32 [B, n] as soon as the next n tokens are there."""
    bursts = _bursts(
        model, prompt_ids, max_new_tokens, temperature, attention_mask, False, **options
    )
    for tokens, _ in bursts:
        yield tokens


def _bursts(
    model: Laneformer,
    prompt_ids: Any,
    max_new_tokens: int,
    temperature: float,
    attention_mask: Any,
    return_logits: bool,
    *,
    eos_token_id: int | None = None,
    seed: int = 0,
    prefill_chunk: int | None = None,
    overflow: Literal["refuse", "cut"] = "refuse",
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    ids_BP, mask_BP = _checked_prompt(model, prompt_ids, attention_mask)
    new = _room(model, ids_BP.shape[1], max_new_tokens, overflow)
    if not isinstance(temperature, numbers.Real):
        raise UserError(f"temperature: {temperature!r} must be a number")
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise UserError(
            f"temperature: {temperature} must be 0 (likeliest token) or from {COLDEST} to {HOTTEST}"
        )
    _check_int("seed", seed, 0, 2**32 - 1)
    if eos_token_id is not None:
        _check_int("eos_token_id", eos_token_id, 0, model.config.vocab_size - 1)
    if prefill_chunk is not None:
        _check_int("prefill_chunk", prefill_chunk, 1)

    graphdef, params = nnx.split(model)
    run = partial(_run, graphdef, model.mesh)
    batch, prompt = ids_BP.shape
    state = _initial_state(model, batch, prompt + new, jax.random.key(seed))
    position_BP = np.maximum(np.cumsum(mask_BP, axis=1) - 1, 0).astype(np.int32)
    chunk = prefill_chunk or prompt
    for at in range(0, prompt, chunk):
        part = slice(at, at + chunk)
        state = run(
            _prefill, params, state, (ids_BP[:, part], mask_BP[:, part], position_BP[:, part])
        )
    remaining = new
    while remaining:
        options = BurstOptions(min(BURST, remaining), temperature == 0, return_logits)
        end = np.int32(-1 if eos_token_id is None else eos_token_id)
        state, tokens, logits, finished = run(
            partial(_burst, options), params, state, (jnp.float32(temperature), end)
        )
        remaining -= options.length
        yield np.asarray(tokens), np.asarray(logits)
        if finished:
            return


def _checked_prompt(
    model: Laneformer, prompt_ids: Any, attention_mask: Any
) -> tuple[np.ndarray, np.ndarray]:
    ids = np.asarray(as_array("prompt_ids", prompt_ids))
    if ids.ndim != 2 or ids.size == 0:
        raise UserError(f"prompt_ids: shape {ids.shape} must be [batch, length], neither of them 0")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"prompt_ids: dtype {ids.dtype} must be an integer type")
    vocab = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(f"prompt_ids: ids {ids.min()}…{ids.max()} must lie in 0…{vocab - 1}")
    mask = np.ones(ids.shape, bool)
    if attention_mask is not None:
        mask = np.asarray(as_array("attention_mask", attention_mask)).astype(bool)
        if mask.shape != ids.shape:
            raise UserError(
                f"attention_mask: shape {mask.shape} must be that of prompt_ids {ids.shape}"
            )
        if not mask[:, -1].all() or (np.diff(mask.astype(np.int8), axis=1) < 0).any():
            raise UserError("attention_mask: prompts must be padded on the left only")
    return ids.astype(np.int32), mask


def _check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise UserError(f"{name}: {value!r} must be an integer, {allowed}")
    if value < least or (most is not None and value > most):
        raise UserError(f"{name}: {value} must be {allowed}")


def _room(model: Laneformer, prompt: int, new: int, overflow: str) -> int:
    """New tokens that fit behind the prompt."""
    limit = model.config.max_position_embeddings
    _check_int("max_new_tokens", new, 1)
    if overflow not in ("refuse", "cut"):
        raise UserError(f"overflow: {overflow!r} must be 'refuse' or 'cut'")
    if prompt + new <= limit:
        return new
    if prompt >= limit or overflow == "refuse":
        raise UserError(
            f"prompt of {prompt} tokens plus max_new_tokens {new} exceeds "
            f"max_position_embeddings {limit}"
        )
    return limit - prompt


def _initial_state(model: Laneformer, batch: int, slots: int, key: jax.Array) -> State:
    config = model.config
    dtype = model.tok_embeddings.weight.dtype
    cache = KVCache.empty(config, batch, slots, dtype, config.num_lanes)
    state = State(
        cache,
        jnp.zeros((batch, config.vocab_size), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), bool),
        key,
    )
    if model.mesh is None:
        return state
    shardings = jax.tree.map(partial(named, model.mesh), _state_specs(state))
    return jax.device_put(state, shardings)


def _state_specs(state: State) -> State:
    specs = jax.tree.map(lambda _: Spec(), state)
    by_lane = tuple(Spec(LANE) for _ in state.cache.keys)
    return specs._replace(cache=specs.cache._replace(keys=by_lane, values=by_lane))


# On the device -------------------------------------------------------------------------------


class BurstOptions(NamedTuple):
    """What a burst is compiled for."""

    length: int
    greedy: bool
    return_logits: bool


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4,))
def _run(
    graphdef: Any, mesh: Mesh | None, body: Any, params: Any, state: State, inputs: Any
) -> Any:
    """Run `body(model, lanes, state, inputs)`, over the mesh's lane axis when there is one."""

    def local(params: Any, state: State, inputs: Any) -> Any:
        model = nnx.merge(graphdef, params)
        lanes = Lanes(model.config.num_lanes, LANE if mesh is not None else None)
        return body(model, lanes, state, inputs)

    if mesh is None:
        return local(params, state, inputs)
    config = nnx.merge(graphdef, params).config
    specs = _state_specs(state)
    # A prefill returns the state alone, a burst the state and what it made.
    out_specs = specs if body is _prefill else (specs, Spec(), Spec(), Spec())
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(parameter_specs(params, config), specs, Spec()),
        out_specs=out_specs,
    )(params, state, inputs)


def _forward(
    model: Laneformer, lanes: Lanes, state: State, ids_BS: Any, mask_BS: Any, position_BS: Any
) -> State:
    out = model.trunk(
        ids_BS, lanes, attention_mask_BS=mask_BS, positions_BS=position_BS, cache=state.cache
    )
    assert out.cache is not None
    logits_BSV = model.logits(out.x_LBSD[:, :, -1:], lanes)
    if model.config.lm_head_type == "vocab_parallel":
        logits_BSV = lanes.concatenate(logits_BSV)
    return state._replace(
        cache=out.cache,
        logits_BV=logits_BSV[:, -1].astype(jnp.float32),
        position_B=position_BS[:, -1] + 1,
    )


def _prefill(model: Laneformer, lanes: Lanes, state: State, inputs: Any) -> State:
    return _forward(model, lanes, state, *inputs)


def _burst(
    options: BurstOptions, model: Laneformer, lanes: Lanes, state: State, inputs: Any
) -> Any:
    temperature, eos = inputs

    def step(state: State, _: None) -> tuple[State, tuple[jax.Array, jax.Array]]:
        if options.greedy:
            token_B = jnp.argmax(state.logits_BV, axis=-1)
        else:
            # By slot, so that a burst's length does not change the draw.
            key = jax.random.fold_in(state.key, state.cache.length)
            token_B = jax.random.categorical(key, state.logits_BV / temperature, axis=-1)
        token_B = jnp.where(state.done_B, eos, token_B.astype(jnp.int32))
        logits_BV = state.logits_BV if options.return_logits else state.logits_BV[:, :0]
        state = state._replace(done_B=state.done_B | (token_B == eos))
        ones_B1 = jnp.ones_like(token_B[:, None], bool)
        state = _forward(model, lanes, state, token_B[:, None], ones_B1, state.position_B[:, None])
        return state, (token_B, logits_BV)

    state, (token_nB, logits_nBV) = jax.lax.scan(step, state, None, length=options.length)
    return state, token_nB.T, logits_nBV.swapaxes(0, 1), jnp.all(state.done_B)
