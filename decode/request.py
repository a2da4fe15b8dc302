"""What a caller asks of the engine, and what comes back. Needs no JAX, so that a server starts quickly.

Shapes: n samples, t tokens, m log-probabilities per token.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from laneformer_jax.errors import UserError, nearest

# Beyond these, float32 logits divided by the temperature overflow, or all tokens are equally likely.
COLDEST, HOTTEST = 1e-6, 1e6
MOST_LOGPROBS = 20
MOST_SAMPLES = 128
OVERFLOW = ("refuse", "cut")
SPECULATE = ("ngram",)

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits. The default takes the likeliest.

    In this order: `logit_bias` is added, the penalties are taken off, `temperature` divides, then
    `top_k`, `top_p` of what is left and `min_p` drop unlikely tokens. Tokens as likely as the last one
    kept are kept too.

    Args:
        temperature: 0 takes the likeliest token, and nothing below is read but penalties and bias.
        top_k: keep the k likeliest tokens; 0 or None keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities reach this sum.
        min_p: keep tokens at least this share as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens that stand in the
            prompt or the answer.
        presence_penalty: taken off the logit of every token that stands in the answer.
        frequency_penalty: the same, times how often it stands there.
        logit_bias: token id -> number added to its logit.
        seed: same seed, same answer, whatever the burst length. Sample i of n has draws of its own.
        logprobs: also return each token's log-probability and those of this many likeliest tokens, 0 to
            20, under the model itself: before bias, penalties and temperature. None: neither.

    Raises:
        UserError: a value of another type or out of range.
    """

    temperature: float = 0.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.top_k is not None:
            check_int("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0, 1, least_open=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias: {self.logit_bias!r} must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            check_int("logit_bias", token, 0)
            _check_number(f"logit_bias[{token}]", bias, -100, 100)
        check_int("seed", self.seed, 0, 2**32 - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MOST_LOGPROBS)

    @property
    def penalises(self) -> bool:
        """Whether the draw depends on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Args:
        prompt_ids: token ids, at least one.
        max_new_tokens: of every sample.
        sampling: how tokens are drawn.
        stop_token_ids: a sample ends before any of these.
        n: samples of the prompt, which share its prefill.
        overflow: when prompt and new tokens exceed the context, `refuse` or `cut` the number of new tokens.
        speculate: `ngram` proposes what followed the same words before, and takes what the model agrees
            with: the same answer, sooner where text repeats. None: one token at a time.

    Raises:
        UserError: a value of another type or out of range. What depends on the model, such as the
            vocabulary and the context, `Engine.check` looks at.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    overflow: Literal["refuse", "cut"] = "refuse"
    speculate: Literal["ngram"] | None = None

    def __post_init__(self) -> None:
        ids = self.prompt_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | np.ndarray):
            raise UserError(f"prompt_ids: {type(ids).__name__} must be a sequence of token ids")
        if len(ids) == 0:
            raise UserError("prompt_ids: is empty; must hold at least one token")
        for token in ids:
            check_int("prompt_ids", token, 0)
        object.__setattr__(self, "prompt_ids", tuple(int(token) for token in ids))
        check_int("max_new_tokens", self.max_new_tokens, 1)
        if not isinstance(self.sampling, Sampling):
            raise UserError(f"sampling: {self.sampling!r} must be a Sampling")
        if not isinstance(self.stop_token_ids, tuple):
            raise UserError(f"stop_token_ids: {self.stop_token_ids!r} must be a tuple of token ids")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0)
        check_int("n", self.n, 1, MOST_SAMPLES)
        check_choice("overflow", self.overflow, OVERFLOW)
        if self.speculate is not None:
            check_choice("speculate", self.speculate, SPECULATE)


class Burst(NamedTuple):
    """What one round trip to the device brought.

    Lists have an entry per sample. Samples go on at their own pace, so their arrays may differ in length;
    a finished sample's are empty.
    """

    tokens: list[np.ndarray]  # n × int32 [t]; without the stop token
    finished: list[Finish | None]  # n; from the burst on in which it is known
    logprobs: list[np.ndarray] | None  # n × float32 [t], of `tokens`
    top_ids: list[np.ndarray] | None  # n × int32 [t,m], likeliest first
    top_logprobs: list[np.ndarray] | None  # n × float32 [t,m]
    proposed: int  # draft tokens looked at in this burst, all samples together
    accepted: int  # of these, how many the model agreed with


def check_temperature(value: Any) -> None:
    if not _is_number(value):
        raise UserError(f"temperature: {value!r} must be a number")
    if value != 0 and not COLDEST <= value <= HOTTEST:
        raise UserError(
            f"temperature: {value} must be 0 (likeliest token) or from {COLDEST} to {HOTTEST}"
        )


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise UserError(f"{name}: {value!r} must be an integer, {allowed}")
    if value < least or (most is not None and value > most):
        raise UserError(f"{name}: {value} must be {allowed}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise UserError(f"{name}: {value!r} must be one of {names}{nearest(str(value), allowed)}")


def _check_number(
    name: str, value: Any, least: float, most: float, *, least_open: bool = False
) -> None:
    allowed = f"{'above' if least_open else 'from'} {least} to {most}"
    if not _is_number(value):
        raise UserError(f"{name}: {value!r} must be a number {allowed}")
    below = value <= least if least_open else value < least
    if not math.isfinite(value) or below or value > most:
        raise UserError(f"{name}: {value} must be {allowed}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
