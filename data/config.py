"""What a run reads: sources, their shares, and how documents become rows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from laneformer_jax.errors import nearest

Kind = Literal[
    "text", "jsonl", "parquet", "array_record", "hub", "tokenized", "stdlib", "stdlib_pairs"
]
Format = Literal["text", "prompt_response", "messages"]
OnError = Literal["raise", "skip"]

# Which fields each kind of source reads, beside those that every source has.
_ROW_FIELDS = ("format", "text_field", "prompt_field", "response_field", "messages_field")
_FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "text": ("path", "pattern", "piece_bytes"),
    "jsonl": ("path", "pattern", *_ROW_FIELDS),
    "parquet": ("path", "pattern", *_ROW_FIELDS),
    "array_record": ("path", "pattern", *_ROW_FIELDS),
    "hub": (
        "path",
        "config_name",
        "split",
        "revision",
        "streaming",
        "shuffle_window",
        *_ROW_FIELDS,
    ),
    "tokenized": ("path",),
    "stdlib": ("include_tests", "piece_bytes"),
    "stdlib_pairs": ("include_tests", "format"),
}
_COMMON = ("kind", "weight", "epochs", "heldout", "on_error")


@dataclass(frozen=True)
class SourceConfig:
    """One source of documents.

    Attributes:
        kind: `text`: every file is a document; `jsonl`: every line is (`.gz` and `.zst` too);
            `parquet`: every row is; `array_record`: every record, a JSON object, is; `hub`: every
            row of a dataset that `datasets.load_dataset` finds by name; `tokenized`: what
            `laneformer data tokenize` wrote; `stdlib`: the source files of the running Python's
            standard library; `stdlib_pairs`: its functions, with their docstrings as instructions.
        path: a file, a folder or a glob, or a list of them; for `hub` the dataset's name.
        pattern: which files of a folder are read, such as `*.py`.
        piece_bytes: files longer than this are cut at line ends into documents of about this size,
            which then come in any order; null: every file is one document.
        weight: share of the mixture's tokens, relative to the other sources.
        epochs: passes after which the source is left out; null for no end.
        heldout: part of the documents (0 to 1) kept for evaluation, chosen by a hash of each
            document's name, so that it stays the same in every run and phase.
        format: what a row holds; null for the kind's own.
        text_field, prompt_field, response_field, messages_field: columns of a row.
        config_name, split, revision: which part and version of a Hub dataset.
        streaming: read a Hub dataset as it comes instead of downloading it first.
        shuffle_window: rows that a stream shuffles among each other.
        include_tests: read the standard library's own tests as well.
        on_error: what a document that cannot be read or encoded does: stop the run, or be counted
            and left out. null: `skip` for the standard library, else `raise`.
    """

    kind: Kind
    path: str | list[str] | None = None
    pattern: str = "*"
    piece_bytes: int | None = None
    weight: float = 1.0
    epochs: int | None = None
    heldout: float = 0.0
    format: Format | None = None
    text_field: str = "text"
    prompt_field: str = "prompt"
    response_field: str = "response"
    messages_field: str = "messages"
    config_name: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    shuffle_window: int = 1000
    include_tests: bool = False
    on_error: OnError | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight = {self.weight}: must be a positive number")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs = {self.epochs}: must be at least 1, or null for no end")
        if not 0 <= self.heldout < 1:
            raise ValueError(f"heldout = {self.heldout}: must be at least 0 and below 1")
        if self.piece_bytes is not None and self.piece_bytes < 1:
            raise ValueError(f"piece_bytes = {self.piece_bytes}: must be at least 1")
        if self.shuffle_window < 1:
            raise ValueError(f"shuffle_window = {self.shuffle_window}: must be at least 1")
        allowed = (*_COMMON, *_FIELDS_OF_KIND[self.kind])
        for f in dataclasses.fields(self):
            if f.name not in allowed and getattr(self, f.name) != f.default:
                own = ", ".join(_FIELDS_OF_KIND[self.kind])
                raise ValueError(
                    f"{f.name}: a source of kind {self.kind!r} has no such field; it has {own}"
                )
        if "path" in allowed and not self.path:
            raise ValueError(f"path: required for a source of kind {self.kind!r}")
        if self.kind in ("hub", "tokenized") and not isinstance(self.path, str):
            raise ValueError(f"path = {self.path}: must be one name for kind {self.kind!r}")

    @property
    def row_format(self) -> Format:
        """`format`, or what the kind holds by itself."""
        if self.format is not None:
            return self.format
        return "prompt_response" if self.kind == "stdlib_pairs" else "text"

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of a row that are read."""
        if self.row_format == "text":
            return (self.text_field,)
        if self.row_format == "prompt_response":
            return (self.prompt_field, self.response_field)
        return (self.messages_field,)

    @property
    def skips_errors(self) -> bool:
        """Whether a bad document is counted and left out instead of ending the run."""
        return (self.on_error or ("skip" if self.kind.startswith("stdlib") else "raise")) == "skip"

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path or ())


@dataclass(frozen=True)
class SchedulePoint:
    """Weights of the sources at one place of a run; a source that is not named has weight 0.

    Attributes:
        tokens: of all sources and processes together, since the run began.
        weights: by source.
    """

    tokens: int
    weights: dict[str, float]

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens = {self.tokens}: must be at least 0")
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weights.{name} = {weight}: must be a finite number, at least 0")
        if sum(self.weights.values()) <= 0:
            raise ValueError("weights: at least one must be above 0")


@dataclass(frozen=True)
class DataConfig:
    """A mixture of sources and how it is packed into rows.

    Attributes:
        sources: by name; names appear in reports and errors.
        schedule: weights that change during the run, in straight lines from point to point and
            constant before the first and after the last; empty: each source's own `weight`.
        packing: `concat` joins documents and cuts rows anywhere, without padding; `best_fit` keeps
            every document in one row where it fits and pads.
        packing_bins: rows that best-fit keeps open at a time.
        deduplicate: leave out documents whose text another document of the source has.
        decontaminate: leave out documents that share 13 words in a row with HumanEval(+) or MBPP(+).
        chat_template: a Jinja file for messages and prompt/response pairs; null for Laneformer's.
        num_workers: processes that tokenise, besides this one; batches do not depend on it.
        read_threads: threads that read and tokenise in each process.
        num_shards: streams that the documents are dealt to; each process holds an equal part of
            them. null: one per process. A run can move to any number of processes that divides it.
        prefetch_batches: finished batches that wait in the background; 0 for none.
        cache_dir: where indexes of large sources are kept; null: `laneformer` in the user's cache.
    """

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    schedule: list[SchedulePoint] = field(default_factory=list)
    packing: Literal["concat", "best_fit"] = "concat"
    packing_bins: int = 64
    deduplicate: bool = True
    decontaminate: bool = True
    chat_template: str | None = None
    num_workers: int = 0
    read_threads: int = 2
    num_shards: int | None = None
    prefetch_batches: int = 2
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, smallest in _SMALLEST.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} = {value}: must be at least {smallest}")
        for i, point in enumerate(self.schedule):
            if i and point.tokens <= self.schedule[i - 1].tokens:
                raise ValueError(f"schedule.{i}.tokens = {point.tokens}: must be above the last")
            for name in point.weights:
                if name not in self.sources:
                    hint = nearest(name, self.sources)
                    raise ValueError(f"schedule.{i}.weights.{name}: no such source{hint}")


_SMALLEST = {
    "packing_bins": 1,
    "num_workers": 0,
    "read_threads": 0,
    "num_shards": 1,
    "prefetch_batches": 0,
}
