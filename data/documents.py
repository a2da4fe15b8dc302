"""Records to training examples: token ids with, for each, the token to predict after it.

An example is int32 [n, 2]: column 0 is the input token, column 1 its target, or IGNORE where no
loss is taken. Inputs and targets are paired inside a document, before packing, so however rows are
cut afterwards no target ever belongs to another document and none is lost at a cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from data.config import SourceConfig
from data.decontaminate import Benchmarks
from data.sources import BadDocument, Record, Source
from laneformer_jax.chat import ChatTemplate
from laneformer_jax.errors import UserError, nearest
from laneformer_jax.tokenizer import Tokenizer

IGNORE = -1

# Why a document is left out; "" is for one that is used.
SKIP_REASONS = (
    "",
    "empty",
    "no_label",
    "undecodable",
    "unreadable",
    "malformed",
    "duplicate",
    "contaminated",
)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Turns the documents of one source into examples; called in any process.

    Attributes:
        name: the source's name in the mixture, for errors.
        source: its documents; None for a stream, whose records are given to `encode`.
        config: which columns a record has, and what a bad one does.
        benchmarks: documents that overlap these are skipped; None: none are.
        max_length: longest example of a chat or pair, in tokens; the end of a longer one is cut
            off, and one without a label left is skipped. None: no limit. Plain text is never cut.
    """

    name: str
    source: Source | None
    config: SourceConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    benchmarks: Benchmarks | None = None
    max_length: int | None = None

    @property
    def size(self) -> int | None:
        """Documents of the source; None for a stream."""
        return None if self.source is None else len(self.source)

    def __call__(self, index: int) -> dict[str, Any]:
        """The encoded document at `index`, see `encode`."""
        source = self.source
        assert source is not None
        try:
            record = source[index]
        except BadDocument as error:
            return self._bad(error, "")
        if self.config.kind == "tokenized":
            return _encoded(record["example"], record["bytes"])
        return self.encode(record, lambda: source.where(index))

    def encode(self, record: Record, where: Callable[[], str]) -> dict[str, Any]:
        """`example` int32 [n, 2], its text's `bytes`, whether it was `truncated`, and `skip`, an
        index into SKIP_REASONS: other than 0 means that `example` is empty.

        Raises:
            UserError: naming source, file and row, for a bad document of a source that does not
                skip them.
        """
        try:
            return self._encode(record)
        except UserError as error:
            return self._bad(error, where())

    def _bad(self, error: UserError, where: str) -> dict[str, Any]:
        if self.config.skips_errors:
            return skipped(error.reason if isinstance(error, BadDocument) else "malformed")
        place = f"{where}: " if where else ""
        raise UserError(f"source {self.name!r}: {place}{error}") from None

    def _encode(self, record: Record) -> dict[str, Any]:
        if self.config.row_format == "text":
            text = self._field(record, self.config.text_field)
            if not text:
                return skipped("empty")
            if self.benchmarks is not None and self.benchmarks.overlap(text):
                return skipped("contaminated")
            return _encoded(text_example(text, self.tokenizer), len(text.encode()))
        messages = self._messages(record)
        chat = self.template.encode(messages, self.tokenizer)
        texts = [str(m["content"]) for m in messages]
        if self.benchmarks is not None and self.benchmarks.overlap("\n".join(texts)):
            return skipped("contaminated")
        example, truncated = chat_example(chat.ids, chat.mask, self.max_length)
        if not (example[:, 1] != IGNORE).any():
            return skipped("no_label")
        # Of an example that is cut, the part of the text that its tokens are of the whole.
        size = sum(len(t.encode()) for t in texts) * len(example) // max(len(chat.ids) - 1, 1)
        return _encoded(example, size, truncated)

    def _messages(self, record: Record) -> list[dict[str, Any]]:
        if self.config.row_format == "prompt_response":
            prompt = self._field(record, self.config.prompt_field)
            response = self._field(record, self.config.response_field)
            return [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
        messages = self._get(record, self.config.messages_field)
        if not isinstance(messages, list):
            raise UserError(
                f"field {self.config.messages_field!r}: must be a list of messages, not"
                f" {type(messages).__name__}"
            )
        return messages

    def _field(self, record: Record, field: str) -> str:
        value = self._get(record, field)
        if not isinstance(value, str):
            raise UserError(f"field {field!r}: must be a string, not {type(value).__name__}")
        return value

    def _get(self, record: Record, field: str) -> Any:
        if field in record and record[field] is None:
            raise UserError(f"field {field!r}: is null")
        if field not in record:
            raise UserError(
                f"field {field!r}: not in this row{nearest(field, record)}; it has"
                f" {', '.join(map(repr, record))}"
            )
        return record[field]


def texts_of(record: Record, config: SourceConfig) -> list[str]:
    """The texts of a record, whatever its format; none for what is not text."""
    if config.row_format == "messages":
        messages = record.get(config.messages_field)
        values = [m.get("content") for m in messages or () if isinstance(m, dict)]
    else:
        values = [record.get(column) for column in config.text_columns]
    return [v for v in values if isinstance(v, str) and v]


def text_example(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """int32 [n, 2] of `<s> text </s>`: every token but the first is a target."""
    ids = tokenizer.encode_array(text)
    example = np.empty((len(ids) + 1, 2), np.int32)
    example[0, 0], example[-1, 1] = tokenizer.bos_id, tokenizer.eos_id
    example[1:, 0] = example[:-1, 1] = ids
    return example


def chat_example(
    ids: np.ndarray, mask: np.ndarray, max_length: int | None = None
) -> tuple[np.ndarray, bool]:
    """int32 [n, 2] of a conversation, with targets where `mask` is true, and whether it was cut."""
    example = np.stack([ids[:-1], np.where(mask[1:], ids[1:], IGNORE)], axis=1).astype(np.int32)
    if max_length is None or len(example) <= max_length:
        return example, False
    return example[:max_length], True


def _encoded(example: np.ndarray, size: int, truncated: bool = False) -> dict[str, Any]:
    return {"example": example, "bytes": size, "truncated": int(truncated), "skip": 0}


def skipped(reason: str) -> dict[str, Any]:
    """The encoding of a document that is left out for `reason`, one of SKIP_REASONS."""
    return {
        "example": np.zeros((0, 2), np.int32),
        "bytes": 0,
        "truncated": 0,
        "skip": SKIP_REASONS.index(reason),
    }
