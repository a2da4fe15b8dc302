"""What a request may say: OpenAI's parameters, and a few that other servers share."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from decode.request import MOST_LOGPROBS, Sampling
from decode.server.errors import ApiError
from laneformer_jax.errors import nearest

MOST_PROMPTS = 64
MOST_MESSAGES = 2048

# Parameters of OpenAI's that this server does not have, and values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_processors": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# These are for a provider's books and change no answer.
_IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")


def _tuple(value: Any) -> Any:
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


Model = TypeVar("Model", bound="_Common")


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False  # token counts in a last chunk without choices
    continuous_usage_stats: bool = False  # and so far in every chunk


class _Common(BaseModel):
    """Parameters of both endpoints. Ranges are the engine's to check."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    stop: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    # As vLLM and others name them.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_tuple)] = ()
    speculate: Literal["ngram"] | None = None

    def sampling(self, logprobs: int | None) -> Sampling:
        """How tokens are drawn; without a seed, by a new one. Raises UserError, ApiError."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(key): value for key, value in self.logit_bias.items()},
            seed=secrets.randbits(32) if self.seed is None else self.seed % 2**32,
            logprobs=logprobs,
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ApiError(400, f"logit_bias: {key!r} is not a token id", param="logit_bias")
    return int(key)


class CompletionRequest(_Common):
    """`/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt: is empty; there is nothing to continue", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > MOST_PROMPTS:
            raise ApiError(
                400, f"prompt: {len(self.prompt)} prompts; at most {MOST_PROMPTS}", param="prompt"
            )
        return self.prompt  # type: ignore[return-value]


class TextPart(BaseModel):
    """A part of a message; images and sounds are not for this model."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message. `developer` is what newer clients call the system."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(_Common):
    """`/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


def parse(model: type[Model], body: Any) -> Model:
    """The request in a JSON body.

    Raises:
        ApiError: 400 naming the first parameter that is unknown, unsupported or wrong.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, f"the body must be a JSON object, not {_json_type(body)}")
    # Clients send null for what they leave alone.
    given = {k: v for k, v in body.items() if v is not None and k not in _IGNORED}
    for name in [name for name in given if name not in model.model_fields]:
        if name not in _UNSUPPORTED:
            hint = nearest(name, model.model_fields)
            raise ApiError(400, f"{name}: unknown parameter{hint}", param=name)
        value = given.pop(name)
        if not any(
            value == neutral and type(value) is type(neutral) for neutral in _UNSUPPORTED[name]
        ):
            raise ApiError(
                400,
                f"{name}: not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return model.model_validate(_without_nulls(given))
    except ValidationError as error:
        raise _first(error, given) from None


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    """Clients copy an answer's message, with its null fields, into the next request."""
    messages = given.get("messages")
    if not isinstance(messages, list):
        return given
    cleaned = [
        {k: v for k, v in m.items() if v is not None or k == "content"}
        if isinstance(m, dict)
        else m
        for m in messages
    ]
    return {**given, "messages": cleaned}


def _first(error: ValidationError, given: Mapping[str, Any]) -> ApiError:
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "string_type" and isinstance(first["input"], list):
        # Or a list of parts: what is wrong with one of those.
        first = next((e for e in errors if len(e["loc"]) > len(first["loc"])), first)
    where = [part for part in first["loc"] if isinstance(part, int) or not _is_union_arm(part)]
    name = str(where[0])
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)[1:]
    told = first["msg"]
    if first["type"] == "missing":
        told = "required, but not given"
    elif first["type"] == "extra_forbidden":
        told = "unknown field"
    elif name == "prompt":
        path, told = name, "must be a string, an array of strings, or an array of token ids"
    elif first["type"] in ("dict_type", "model_type"):
        told = f"{_shown(first['input'])} must be an object"
    elif first["type"] == "too_long":
        told = f"has {first['ctx']['actual_length']} entries; at most {first['ctx']['max_length']}"
    elif told.startswith("Input should"):
        told = f"{_shown(first['input'])} must{told.removeprefix('Input should')}"
    elif first["type"] == "too_short":
        told = "is empty"
    return ApiError(400, f"{path}: {told}", param=name)


def _is_union_arm(part: str) -> bool:
    """Pydantic puts the type it tried into the path: `str`, `list[TextPart]`."""
    return part in ("str", "int") or part[:4] in ("list", "func")


def _shown(value: Any) -> str:
    """A value in an error; a large one by its type."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else _json_type(value)


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
