"""From a prompt or chat messages to a stream of text: what `generate`, `serve` and evaluation share."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from decode.engine import Engine
from decode.request import Burst, Finish, Request
from decode.text import TextStream, checked_stops
from laneformer_jax.chat import Message
from laneformer_jax.checkpoint.load import Loaded
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Ask:
    """A request to the engine, and the strings that end its answers."""

    request: Request
    stop: tuple[str, ...] = ()


class Token(NamedTuple):
    """A token of an answer."""

    id: int
    start: int  # where in the answer its text begins, in characters
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # likeliest ids and their log-probabilities


class Piece(NamedTuple):
    """The next part of one answer. Only the last has a `finish`."""

    sample: int
    text: str
    tokens: tuple[Token, ...]  # those whose text has begun
    drawn: int  # tokens drawn since the last piece, those of a stop string too
    finish: Finish | None


class Step(NamedTuple):
    """What one burst brought."""

    pieces: list[Piece]
    proposed: int  # draft tokens of speculation, and
    accepted: int  # how many of them were right


def ask(
    loaded: Loaded,
    engine: Engine,
    prompt: str | Sequence[Message] | Sequence[int],
    max_new_tokens: int | None = None,
    *,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    **request: Any,
) -> Ask:
    """What to ask the engine for; all of it checked.

    Args:
        prompt: text to continue, chat messages to answer, or token ids.
        max_new_tokens: None: what the context leaves.
        stop: strings that end an answer and do not belong to it.
        ignore_eos: go on behind the end token.
        request: see `decode.request.Request`.

    Raises:
        UserError: anything the prompt, the model or the engine cannot take.
    """
    if len(prompt) == 0:
        raise UserError("prompt: is empty; there is nothing to continue")
    is_ids = not isinstance(prompt, str) and isinstance(prompt[0], int)
    ids = prompt if is_ids else loaded.prompt_ids(prompt)  # type: ignore[arg-type]
    ends = () if ignore_eos else (loaded.tokenizer.eos_id,)
    if max_new_tokens is None:
        if len(ids) >= engine.context:
            raise UserError(
                f"prompt: {len(ids)} tokens leave no room in the context of {engine.context}"
            )
        max_new_tokens = engine.context - len(ids)
    made = Request(
        ids,  # type: ignore[arg-type]
        max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys((*ends, *stop_token_ids))),
        **request,
    )
    engine.check(made)
    return Ask(made, checked_stops(stop))


def complete(engine: Engine, tokenizer: Tokenizer, asked: Ask) -> Generator[Step, None, None]:
    """The answers, part by part, until every one has finished.

    The texts of a sample's pieces joined are what its tokens decode to, up to a stop string. Closing
    the iterator cancels what is left.
    """
    bursts = engine.stream(asked.request)
    samples = [_Sample(i, tokenizer, asked.stop) for i in range(asked.request.n)]
    try:
        for burst in bursts:
            pieces = [p for sample in samples if (p := sample.take(burst)) is not None]
            yield Step(pieces, burst.proposed, burst.accepted)
            if all(sample.finished for sample in samples):
                return
    finally:
        bursts.close()  # type: ignore[attr-defined]  # a generator


class _Sample:
    """One answer as it grows."""

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str]):
        self._index, self._tokenizer = index, tokenizer
        self._text = TextStream(tokenizer, stop)
        self._waiting: deque[Token] = deque()  # their text has not begun
        self.finished = False

    def take(self, burst: Burst) -> Piece | None:
        """The piece that a burst makes, if any."""
        if self.finished:
            return None
        i = self._index
        parts, drawn = [], 0
        for t, token in enumerate(burst.tokens[i].tolist()):
            parts.append(self._push(token, burst, t))
            drawn += 1
            if self._text.stopped:
                break
        finish: Finish | None = "stop" if self._text.stopped else burst.finished[i]
        if finish:
            parts.append(self._text.flush())
            finish = "stop" if self._text.stopped else finish
            self.finished = True
        tokens = tuple(self._begun())
        if not (drawn or finish):
            return None
        return Piece(i, "".join(parts), tokens, drawn, finish)

    def _push(self, token: int, burst: Burst, t: int) -> str:
        before = self._text.decoded
        part = self._text.push(token)
        own = self._length(token)
        # What came before may have become certain only now.
        start = max(before, self._text.decoded - own) if own else before
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if burst.logprobs is not None:
            logprob = float(burst.logprobs[self._index][t])
        if burst.top_ids is not None and burst.top_logprobs is not None:
            top = tuple(
                zip(
                    burst.top_ids[self._index][t].tolist(),
                    burst.top_logprobs[self._index][t].tolist(),
                    strict=True,
                )
            )
        self._waiting.append(Token(token, start, logprob, top))
        return part

    def _length(self, token: int) -> int:
        """Characters of a token that is whole characters; else 0."""
        if token >= self._tokenizer.vocab_size:
            return 0
        try:
            return len(self._tokenizer.token_bytes(token).decode("utf-8"))
        except UnicodeDecodeError:
            return 0

    def _begun(self) -> Iterator[Token]:
        """Tokens whose text has begun, so that none shows what a stop string cut off."""
        everything = self.finished and not self._text.stopped
        while self._waiting and (everything or self._waiting[0].start < self._text.given):
            yield self._waiting.popleft()
