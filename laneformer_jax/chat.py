"""Chat messages to token ids and a mask of what the assistant said.

Templates are Jinja, as Hugging Face's `chat_template`; they run in Jinja's sandbox. The rendered
text is cut at control tokens, which become ids, and everything between them is encoded as plain
text. A marker that stands in a message is encoded as plain text too, so no message can end its own
turn or speak for the assistant.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np

from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import Tokenizer

Message = Mapping[str, Any]

# Noncharacters: no text that is exchanged between programs holds them. Removed after rendering.
_BREAK, _BEGIN, _END = "\ufdd0", "\ufdd1", "\ufdd2"
_OURS = re.compile(f"[{_BREAK}{_BEGIN}{_END}]")


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as `ids` int32 [n] and `mask` bool [n]: True where the assistant speaks."""

    ids: np.ndarray
    mask: np.ndarray


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text; None for Laneformer's own (`chat_template.jinja` in this package).
        name: what errors call it.

    Raises:
        UserError: the text is not valid Jinja.
    """

    def __init__(self, source: str | None = None, name: str = "chat_template.jinja"):
        self.source = default_template() if source is None else source
        self.name = name
        try:
            self._template = _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{name}:{error.lineno}: not a valid template: {error}") from None
        self._has_marks = bool(re.search(r"\{%-?\s*generation\s*-?%\}", self.source))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ChatTemplate:
        """Read a template file. Raises UserError when it is missing or not valid."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.name)

    def encode(
        self, messages: Sequence[Message], tokenizer: Tokenizer, add_generation_prompt: bool = False
    ) -> EncodedChat:
        """Encode a conversation; the begin token stands in front exactly once.

        A template without `{% generation %}` marks is rendered turn by turn, and the assistant's
        part is what each of its turns adds to the prompt before it, up to the token that ends the
        turn.

        Args:
            messages: `{"role": …, "content": …}`; content is a string, or a list of text parts as
                in OpenAI's format.
            tokenizer: gives the control tokens.
            add_generation_prompt: end with what asks the assistant to speak.

        Raises:
            UserError: a message is malformed, the template refuses it, or it has no generation
                marks and its turns do not extend one another.
        """
        plain = [_checked(i, message) for i, message in enumerate(messages)]
        if not plain:
            raise UserError("messages: is empty")
        guarded = [
            {**m, "content": _guard(m["content"], tuple(tokenizer.control_ids))} for m in plain
        ]
        if self._has_marks:
            text = self._render(guarded, tokenizer, add_generation_prompt)
        else:
            text = self._marked_by_turns(guarded, tokenizer, add_generation_prompt)
        return _tokens(text, tokenizer)

    def _render(self, messages: Sequence[Message], tokenizer: Tokenizer, prompt: bool) -> str:
        names = {i: name for name, i in tokenizer.control_ids.items()}
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=prompt,
                bos_token=names.get(tokenizer.bos_id, ""),
                eos_token=names.get(tokenizer.eos_id, ""),
            )
        except jinja2.TemplateError as error:
            raise UserError(f"{self.name}: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{self.name}: fails on these messages: {error}") from None

    def _marked_by_turns(
        self, messages: Sequence[Message], tokenizer: Tokenizer, prompt: bool
    ) -> str:
        whole = self._render(messages, tokenizer, prompt)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], tokenizer, True) if i else ""
            after = self._render(messages[: i + 1], tokenizer, False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError(
                    f"{self.name}: has no {{% generation %}} marks, and its turns do not extend"
                    " one another, so what the assistant said cannot be told apart; put"
                    " {% generation %}…{% endgeneration %} around the assistant's text and end"
                    " token"
                )
            spans.append((len(before), _turn_end(after, len(before), tokenizer)))
        for start, end in reversed(spans):
            whole = whole[:start] + _BEGIN + whole[start:end] + _END + whole[end:]
        return whole


def default_template() -> str:
    """The Jinja text of Laneformer's own template."""
    return (resources.files("laneformer_jax") / "chat_template.jinja").read_text(encoding="utf-8")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` puts marks around its body."""

    tags = {"generation"}  # noqa: RUF012  declared by the base class

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = [
            jinja2.nodes.Output([jinja2.nodes.TemplateData(text)]).set_lineno(line)
            for text in (_BEGIN, _END)
        ]
        return [mark[0], *body, mark[1]]


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment


def _checked(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"messages[{index}]: must be a mapping, not {type(message).__name__}")
    for field in ("role", "content"):
        if field not in message:
            raise UserError(f"messages[{index}].{field}: required, but not given")
    if not isinstance(message["role"], str):
        raise UserError(f"messages[{index}].role = {message['role']!r}: must be a string")
    content = message["content"]
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [p.get("text") if isinstance(p, Mapping) else None for p in content]
        if not all(isinstance(p, str) for p in parts):
            raise UserError(f"messages[{index}].content: only text parts can be encoded")
        content = "".join(str(p) for p in parts)
    if not isinstance(content, str):
        raise UserError(
            f"messages[{index}].content: must be a string, not {type(content).__name__}"
        )
    return {**message, "content": content}


def _guard(content: str, control: tuple[str, ...]) -> str:
    """Breaks every control token that `content` spells or might begin to spell at its end."""
    content = _OURS.sub("\ufffd", content)
    for token in control:
        if token in content:
            content = content.replace(token, token[0] + _BREAK + token[1:])
        for size in range(len(token) - 1, 0, -1):
            if content.endswith(token[:size]):
                content = (
                    content[: len(content) - size + 1] + _BREAK + content[len(content) - size + 1 :]
                )
                break
    return content


def _turn_end(text: str, start: int, tokenizer: Tokenizer) -> int:
    """The end of a turn's text: behind its last control token if only space follows that."""
    last = start
    for match in _control_pattern(tuple(tokenizer.control_ids)).finditer(text, start):
        last = match.end()
    return last if last > start and not text[last:].strip() else len(text)


@functools.lru_cache(maxsize=8)
def _control_pattern(control: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(control, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _tokens(text: str, tokenizer: Tokenizer) -> EncodedChat:
    control = _control_pattern(tuple(tokenizer.control_ids))
    pieces: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    speaking = False

    def put(ids: np.ndarray) -> None:
        pieces.append(ids)
        masks.append(np.full(len(ids), speaking))

    def put_text(part: str) -> None:
        plain = part.replace(_BREAK, "")
        if plain:
            put(tokenizer.encode_array(plain, continues=bool(pieces)))

    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part in (_BEGIN, _END):
            speaking = part == _BEGIN
            continue
        end = 0
        for match in control.finditer(part):
            put_text(part[end : match.start()])
            put(np.asarray([tokenizer.control_ids[match[0]]], np.int32))
            end = match.end()
        put_text(part[end:])
    ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    mask = np.concatenate(masks) if masks else np.zeros(0, bool)
    begins = int(np.argmin(np.append(ids == tokenizer.bos_id, False)))
    if begins == 0:
        ids = np.concatenate([np.asarray([tokenizer.bos_id], np.int32), ids])
        mask = np.concatenate([[False], mask])
    return EncodedChat(ids[max(begins - 1, 0) :], mask[max(begins - 1, 0) :])
