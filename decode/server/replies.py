"""What a client gets, in the format of its endpoint, whole or as a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.complete import Piece, Token
from decode.request import Finish
from decode.server.jobs import Job, Part
from laneformer_jax.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; OpenAI sends this


@dataclass
class Choice:
    """One answer as far as it has come."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    drawn: int = 0
    finish: Finish | None = None


class Reply:
    """The answers to one job. Subclasses know an endpoint's format.

    Args:
        logprobs: whether log-probabilities were asked for.
        usage: whether a stream ends with token counts, and
        running: whether each of its chunks has them.
    """

    prefix: str
    whole: str
    chunk: str

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        model: str,
        *,
        logprobs: bool,
        usage: bool = False,
        running: bool = False,
    ):
        self._job, self._tokenizer = job, tokenizer
        self._logprobs, self._usage, self._running = logprobs, usage, running
        self._per_prompt = job.asks[0].request.n
        self.choices = [Choice() for _ in range(len(job.asks) * self._per_prompt)]
        self._envelope = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def add(self, part: Part) -> list[tuple[int, Piece]]:
        """Take in a part of the answers; its pieces with the numbers of their choices."""
        numbered = []
        for piece in part.step.pieces:
            index = part.prompt * self._per_prompt + piece.sample
            choice = self.choices[index]
            choice.texts.append(piece.text)
            choice.drawn += piece.drawn
            choice.finish = piece.finish
            if self._logprobs:
                choice.tokens += piece.tokens
            numbered.append((index, piece))
        return numbered

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": i,
                **self._answer("".join(choice.texts)),
                "logprobs": self._logprobs_of(choice.tokens) if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for i, choice in enumerate(self.choices)
        ]
        return {**self._envelope, "object": self.whole, "choices": choices, "usage": self.usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks in front of the first text."""
        yield from ()

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Chunks of a part of the answers; none when it adds nothing that a client sees."""
        for index, piece in self.add(part):
            if piece.text or piece.finish or (self._logprobs and piece.tokens):
                shown = self._logprobs_of(piece.tokens) if self._logprobs else None
                yield self._chunk(index, self._delta(piece.text), shown, piece.finish)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The chunk behind the last text, if one was asked for."""
        if self._usage:
            yield {
                **self._envelope,
                "object": self.chunk,
                "choices": [],
                "usage": self.usage(),
            }

    def usage(self) -> dict[str, int]:
        """Token counts so far; a prompt counts once, however many samples it has."""
        prompt = self._job.prompt_tokens
        drawn = sum(choice.drawn for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, finish: Finish | None
    ) -> dict[str, Any]:
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._envelope, "object": self.chunk, "choices": [choice]}
        if self._usage or self._running:
            chunk["usage"] = self.usage() if self._running else None
        return chunk

    def _answer(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs_of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionReply(Reply):
    """`/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _answer(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs_of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [self._name(t.id) for t in tokens],
            "token_logprobs": [_finite(t.logprob) for t in tokens],
            "top_logprobs": [
                # The token itself too, when it is not among the likeliest.
                {self._name(i): _finite(lp) for i, lp in (*t.top, (t.id, t.logprob))}
                for t in tokens
            ],
            "text_offset": [t.start for t in tokens],
        }

    def _name(self, token_id: int) -> str:
        data = _bytes(self._tokenizer, token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:  # part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatReply(Reply):
    """`/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks."""
        for index in range(len(self.choices)):
            delta = {"delta": {"role": "assistant", "content": "", "refusal": None}}
            yield self._chunk(index, delta, None, None)

    def _answer(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs_of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = [
            {
                **self._token(t.id, t.logprob),
                "top_logprobs": [self._token(i, lp) for i, lp in t.top],
            }
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = _bytes(self._tokenizer, token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def _finite(logprob: float | None) -> float:
    return max(_LEAST, logprob) if logprob is not None else _LEAST
