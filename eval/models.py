"""Where answers come from: a checkpoint, or an OpenAI-compatible endpoint."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from eval import prompts
from laneformer_jax.errors import UserError

_RETRIES = 6
_TIMEOUT = 600.0  # seconds for one answer


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Args:
        n: answers per task.
        temperature: 0 takes the likeliest token.
        max_new_tokens: EvalPlus gives 768.
        seed: answer i of a task uses seed + i.
    """

    n: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 768
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """One answer; `text` is what is extracted from (a base model's starts with the prompt)."""

    text: str
    finish_reason: str
    tokens: int


class Model(Protocol):
    """Something that answers prompts."""

    name: str

    def answer(self, prompt: str, family: str, sampling: Sampling, index: int) -> Answer:
        """Answer number `index` to a task's prompt."""


class CheckpointModel:
    """A Laneformer checkpoint, ours or a Hugging Face folder or repository.

    Args:
        path: see `laneformer_jax.checkpoint.load.load_checkpoint`.
        chat: ask through the chat template; else the prompt is continued as text.
        dtype: of the parameters; None keeps the files'.
    """

    def __init__(self, path: str, chat: bool, dtype: str | None = None):
        from decode.engine import Engine
        from laneformer_jax.checkpoint.load import load_checkpoint

        self.name, self._chat = str(path), chat
        self._loaded = load_checkpoint(path, dtype=dtype)
        self.model, self.tokenizer, self._template = self._loaded
        self._engine = Engine(self.model, vocab_size=self.tokenizer.vocab_size)

    def answer(self, prompt: str, family: str, sampling: Sampling, index: int) -> Answer:
        """See `Model.answer`. A prompt longer than the context is answered by nothing.

        `tokens` are those whose text the answer holds, with a stop string's first where it shares one.
        """
        import decode
        from decode.complete import ask, complete

        ids, start = self.prompt_ids(prompt)
        if len(ids) >= self._engine.context:
            return Answer(start, "prompt too long", 0)
        asked = ask(
            self._loaded,
            self._engine,
            ids,
            sampling.max_new_tokens,
            sampling=decode.Sampling(temperature=sampling.temperature, seed=sampling.seed + index),
            overflow="cut",
        )
        # Not the engine's stop strings: whether a fence ends an answer depends on what stands before it.
        ends = prompts.stops(family, self._chat)
        longest = max(map(len, ends))
        text, begins, finish = "", [], "length"
        with closing(complete(self._engine, self.tokenizer, asked)) as steps:
            for piece in (piece for step in steps for piece in step.pieces):
                begin = max(0, len(text) - longest)  # one may begin in what was already there
                text += piece.text
                begins += [token.start for token in piece.tokens]
                finish = piece.finish or finish
                before = prompts.cut(text, ends, begin)
                if before is not None:
                    tokens = sum(at < len(before) for at in begins)
                    return Answer(start + before, "stop", tokens)
        return Answer(start + text, finish, len(begins))

    def prompt_ids(self, prompt: str) -> tuple[list[int], str]:
        """Token ids, and the text an answer starts with."""
        if not self._chat:
            text = prompts.completion(prompt)
            return self.tokenizer.encode(text, bos=True), text
        message = [{"role": "user", "content": prompts.question(prompt)}]
        encoded = self._template.encode(message, self.tokenizer, add_generation_prompt=True)
        begun = self.tokenizer.encode_array(prompts.answer_start(), continues=True)
        return [*encoded.ids.tolist(), *begun.tolist()], ""


class EndpointModel:
    """A server with OpenAI's `/chat/completions` or `/completions`.

    Args:
        url: base address, such as `http://localhost:8000/v1`.
        model: name to ask for.
        chat: which of the two to use.

    The key, if one is needed, is read from OPENAI_API_KEY.
    """

    def __init__(self, url: str, model: str, chat: bool):
        self.name, self._model, self._chat = f"{model} at {url}", model, chat
        self._url = url.rstrip("/") + ("/chat/completions" if chat else "/completions")

    def answer(self, prompt: str, family: str, sampling: Sampling, index: int) -> Answer:
        """See `Model.answer`; tries again when the server is busy or gone for a while."""
        text = prompts.completion(prompt)
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed + index,
        }
        if self._chat:
            # The answer cannot be begun for the model here, so it is not cut at a closing fence.
            body["messages"] = [{"role": "user", "content": prompts.question(prompt)}]
        else:
            body |= {"prompt": text, "stop": ["\ndef ", "\nclass ", "\nif ", "\nprint"]}
        reply = self._post(body)
        try:
            choice = reply["choices"][0]
            got = choice["message"]["content"] if self._chat else choice["text"]
            usage = reply.get("usage") or {}
            tokens = int(usage.get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self._url}: the reply has no choices[0] with text ({error!r})"
            ) from None
        got = got or ""
        if not self._chat:
            ends = prompts.stops(family, chat=False)
            got = text + (got if (before := prompts.cut(got, ends)) is None else before)
        return Answer(got, str(choice.get("finish_reason") or "stop"), tokens)

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        for attempt in range(_RETRIES):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                told = error.read(300).decode("utf-8", "replace").strip()
                if error.code not in (408, 409, 429) and error.code < 500:
                    raise UserError(f"{self._url}: {error.code} {told}") from None
                last = f"{error.code} {told}"
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                last = str(getattr(error, "reason", error))
            if attempt + 1 < _RETRIES:
                time.sleep(min(0.5 * 2**attempt, 20))
        raise UserError(f"{self._url}: no answer after {_RETRIES} tries ({last})")
