"""Where documents come from. Every source gives records by index, the same ones every time."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, Protocol

from data.config import SourceConfig
from laneformer_jax.errors import UserError

Record = dict[str, Any]
Split = Literal["train", "heldout", "all"]


class BadDocument(UserError):
    """One document that cannot be used; `reason` is the word it is counted under."""

    def __init__(self, where: str, reason: str, detail: str = ""):
        super().__init__(f"{where}: {detail or reason}")
        self.reason = reason


class Source(Protocol):
    """Documents by index. Pickles cheaply: workers get a copy."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """The record at `index`; raises BadDocument when it cannot be read."""

    def where(self, index: int) -> str:
        """File and row, for errors."""


def is_heldout(name: str, fraction: float) -> bool:
    """Whether the document called `name` belongs to the held-out `fraction`.

    Depends on nothing but its arguments, and a larger fraction holds a smaller one.
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def in_split(name: str, fraction: float, split: Split) -> bool:
    """Whether the document called `name` is in `split`."""
    return split == "all" or is_heldout(name, fraction) == (split == "heldout")


def open_source(name: str, config: SourceConfig, split: Split = "train") -> Source:
    """The source that `config` describes.

    Args:
        name: its name in the mixture, for errors.
        config: what to open.
        split: `train` without the held-out documents, `heldout` only those, or `all`.

    Raises:
        UserError: nothing to read, or the split is empty.
    """
    source: Source
    if config.kind == "text":
        from data.sources.files import TextFiles

        source = TextFiles.find(name, config, split)
    elif config.kind == "jsonl":
        from data.sources.jsonl import JsonLines

        source = JsonLines.find(name, config, split)
    elif config.kind == "stdlib":
        from data.sources.stdlib import stdlib_files

        source = stdlib_files(config, split)
    else:
        from data.sources.stdlib import StdlibPairs

        source = StdlibPairs.cut(config, split)
    if not len(source):
        share = f" (heldout = {config.heldout})" if split == "heldout" else ""
        raise UserError(f"source {name!r}: holds no documents in split {split!r}{share}")
    return source
