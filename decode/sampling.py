"""Drawing tokens on the device from logits that may be spread over devices.

A draw inverts the cumulative distribution in the order of the vocabulary at one uniform number. So what
rounding moves (another device count, another kernel) moves a token only when the number lies next to a
boundary, and the numbers depend on seed, sample and position alone.

Shapes: B batch, v this device's part of the vocabulary, m log-probabilities per token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decode.request import Sampling
from decode.shards import Shards

BLOCK = 128  # tokens whose probabilities are summed before any is looked at by itself


class Filters(NamedTuple):
    """What a draw is compiled for."""

    greedy: bool = True
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalised: bool = False
    biased: bool = False
    logprobs: int | None = None

    @property
    def as_they_are(self) -> bool:
        """Whether a draw is the likeliest token by the model's own logits."""
        return self.greedy and not self.penalised and not self.biased

    @classmethod
    def of(cls, sampling: Sampling) -> "Filters":
        greedy = sampling.temperature == 0
        return cls(
            greedy=greedy,
            top_k=not greedy and bool(sampling.top_k),
            top_p=not greedy and sampling.top_p < 1,
            min_p=not greedy and sampling.min_p > 0,
            penalised=sampling.penalises,
            biased=bool(sampling.logit_bias),
            logprobs=sampling.logprobs,
        )


class Knobs(NamedTuple):
    """The numbers of a `Sampling`, for the device; float32 scalars unless said."""

    temperature: Any
    top_k: Any  # int32
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    seed: Any  # uint32
    bias_v: Any  # float32, or None

    @classmethod
    def of(cls, sampling: Sampling, rows: int) -> "Knobs":
        """For a vocabulary of `rows`, those beyond its end on the last device included."""
        bias_v = None
        if sampling.logit_bias:
            bias_v = np.zeros(rows, np.float32)
            bias_v[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
        return cls(
            np.float32(sampling.temperature or 1),
            np.int32(min(sampling.top_k or rows, rows)),
            np.float32(sampling.top_p),
            np.float32(sampling.min_p),
            np.float32(sampling.repetition_penalty),
            np.float32(sampling.presence_penalty),
            np.float32(sampling.frequency_penalty),
            np.uint32(sampling.seed),
            bias_v,
        )


class Seen(NamedTuple):
    """Tokens so far, for the penalties."""

    prompt_Bv: Any  # bool
    answer_Bv: Any  # int32, how often


def adjusted(logits_Bv: jax.Array, knobs: Knobs, filters: Filters, seen: Seen | None) -> jax.Array:
    """Logits with bias and penalties."""
    if filters.biased:
        assert knobs.bias_v is not None
        logits_Bv = logits_Bv + knobs.bias_v
    if filters.penalised:
        assert seen is not None
        answered_Bv = seen.answer_Bv > 0
        repeated = jnp.where(
            logits_Bv > 0, logits_Bv / knobs.repetition, logits_Bv * knobs.repetition
        )
        logits_Bv = jnp.where(answered_Bv | seen.prompt_Bv, repeated, logits_Bv)
        logits_Bv -= knobs.presence * answered_Bv + knobs.frequency * seen.answer_Bv
    return logits_Bv


def draw(
    logits_Bv: jax.Array,
    uniform_B: jax.Array | None,
    knobs: Knobs,
    filters: Filters,
    shards: Shards,
) -> jax.Array:
    """Tokens int32 [B], equal on all devices.

    logits: float32, adjusted; -inf for what may not be drawn. uniform: None where the likeliest is taken.
    """
    best_B = shards.max(jnp.max(logits_Bv, axis=-1))
    if filters.greedy:
        # Of equal ones the first, as argmax has it.
        first_B = jnp.argmax(logits_Bv, axis=-1)
        largest_B = jnp.take_along_axis(logits_Bv, first_B[:, None], axis=-1)[:, 0]
        return shards.min(jnp.where(largest_B == best_B, shards.ids()[first_B], shards.vocab - 1))
    assert uniform_B is not None
    z_Bv = (logits_Bv - best_B[:, None]) / knobs.temperature
    return _invert(kept(z_Bv, knobs, filters, shards), uniform_B, shards)


def kept(z_Bv: jax.Array, knobs: Knobs, filters: Filters, shards: Shards) -> jax.Array:
    """exp(z) of the tokens that the filters keep, 0 for the others. z: at most 0, tempered."""
    weight_Bv = jnp.exp(z_Bv)
    key_Bv = _ordered(z_Bv)
    least_B = jnp.zeros(z_Bv.shape[:1], jnp.uint32)
    if filters.top_k:
        goal_B = jnp.broadcast_to(knobs.top_k.astype(jnp.float32), least_B.shape)
        least_B = _threshold(key_Bv, jnp.ones_like(weight_Bv), goal_B, shards)
        weight_Bv = jnp.where(key_Bv >= least_B[:, None], weight_Bv, 0)
    if filters.top_p:
        goal_B = knobs.top_p * shards.sum(jnp.sum(weight_Bv, axis=-1))
        least_B = _threshold(key_Bv, weight_Bv, goal_B, shards)
        weight_Bv = jnp.where(key_Bv >= least_B[:, None], weight_Bv, 0)
    if filters.min_p:
        weight_Bv = jnp.where(z_Bv >= jnp.log(knobs.min_p), weight_Bv, 0)
    return weight_Bv


def _ordered(z: jax.Array) -> jax.Array:
    """uint32 that compare as the float32 do."""
    bits = jax.lax.bitcast_convert_type(z + 0.0, jnp.uint32)  # + 0: one zero only
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
    key_Bv: jax.Array, weight_Bv: jax.Array, goal_B: jax.Array, shards: Shards
) -> jax.Array:
    """The largest uint32 at or above which keys weigh `goal` together, [B].

    Found bit by bit: a sort of the vocabulary would cost many times as much, and cannot be shared.
    """

    def bit(i: jax.Array, found_B: jax.Array) -> jax.Array:
        tried_B = found_B | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        above_Bv = jnp.where(key_Bv >= tried_B[:, None], weight_Bv, 0)
        return jnp.where(shards.sum(jnp.sum(above_Bv, axis=-1)) >= goal_B, tried_B, found_B)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(key_Bv.shape[:1], jnp.uint32))


def _invert(weight_Bv: jax.Array, uniform_B: jax.Array, shards: Shards) -> jax.Array:
    """The first token whose cumulative weight exceeds uniform × all of it."""
    batch, size = weight_Bv.shape
    blocks = -(-size // BLOCK)
    weight_BnK = jnp.pad(weight_Bv, ((0, 0), (0, blocks * BLOCK - size)))
    weight_BnK = weight_BnK.reshape(batch, blocks, BLOCK)
    block_Bn = jnp.sum(weight_BnK, axis=-1)
    here_B = jnp.sum(block_Bn, axis=-1)
    target_B = uniform_B * shards.sum(here_B)
    upto_Bn = shards.before(here_B)[:, None] + jnp.cumsum(block_Bn, axis=-1)
    crossed_Bn = (upto_Bn > target_B[:, None]) & (block_Bn > 0)
    n_B1 = jnp.argmax(crossed_Bn, axis=-1)[:, None]
    inside_BK = jnp.take_along_axis(weight_BnK, n_B1[:, :, None], axis=1)[:, 0]
    start_B1 = jnp.take_along_axis(upto_Bn - block_Bn, n_B1, axis=-1)
    beyond_BK = start_B1 + jnp.cumsum(inside_BK, axis=-1) > target_B[:, None]
    # Rounding may put the crossing behind the block's last token: then it is that one.
    last_BK = jnp.arange(BLOCK) == BLOCK - 1 - jnp.argmax(inside_BK[:, ::-1] > 0, axis=-1)[:, None]
    pick_BK = (inside_BK > 0) & (beyond_BK | last_BK)
    at_B = n_B1[:, 0] * BLOCK + jnp.argmax(pick_BK, axis=-1)
    ids = shards.ids()
    token_B = jnp.where(jnp.any(crossed_Bn, axis=-1), ids[at_B], shards.vocab)
    token_B = shards.min(token_B)
    # And behind the last of all: then that one.
    final_B = shards.max(jnp.max(jnp.where(weight_Bv > 0, ids, 0), axis=-1))
    return jnp.minimum(token_B, final_B).astype(jnp.int32)


def uniform(seed: jax.Array, row_B: jax.Array, position_B: jax.Array) -> jax.Array:
    """The number behind the token at a position of a row, float32 [B] in [0, 1)."""

    def one(row: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(row_B, position_B)


def log_probabilities(
    logits_Bv: jax.Array, token_B: jax.Array, m: int, shards: Shards
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of `token` [B], and of the m likeliest tokens: their ids and theirs [B,m], likeliest first."""
    best_B = shards.max(jnp.max(logits_Bv, axis=-1))
    mass_B = shards.sum(jnp.sum(jnp.exp(logits_Bv - best_B[:, None]), axis=-1))
    log_all_B = best_B + jnp.log(mass_B)
    top_Bm, at_Bm = jax.lax.top_k(logits_Bv, min(m, shards.size))
    batch = len(token_B)
    # Devices in order, so that of equal ones the first in the vocabulary stays first.
    all_Bm = jnp.moveaxis(shards.gather(jnp.maximum(top_Bm, -1e30)), -1, 1).reshape(batch, -1)
    ids_Bm = jnp.moveaxis(shards.gather(shards.ids()[at_Bm]), -1, 1).reshape(batch, -1)
    top_Bm, at_Bm = jax.lax.top_k(all_Bm, m)
    ids_Bm = jnp.take_along_axis(ids_Bm, at_Bm, axis=-1)
    finite_Bv = jnp.maximum(logits_Bv, -1e30)  # 0 × -inf is no number
    return shards.at(finite_Bv, token_B) - log_all_B, ids_Bm, top_Bm - log_all_B[:, None]
