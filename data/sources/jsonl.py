"""JSON lines, plain or compressed: every line is one document."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from data.config import SourceConfig
from data.sources import BadDocument, Record, Split, in_split
from data.sources.files import expand, utf8
from laneformer_jax.errors import UserError

_BLOCK = 16 << 20


class JsonLines:
    """Rows of one or more files, in the order of the files' paths and of their lines.

    A plain file is read row by row through an index of its line starts. A compressed one is
    unpacked into memory when it is first read.

    Args:
        files: paths.
        starts: per file, int64 [rows+1]: where each row starts, and the end of the last.
        rows: int64 [documents, 2]: file and row of each document.
    """

    def __init__(self, files: Sequence[str], starts: Sequence[np.ndarray], rows: np.ndarray):
        self._files, self._starts, self._rows = list(files), list(starts), rows

    @classmethod
    def find(cls, name: str, config: SourceConfig, split: Split) -> JsonLines:
        """Index what `config` names; empty lines are no documents."""
        found = [pair for path in config.paths for pair in expand(name, path, config.pattern)]
        files: list[str] = []
        starts: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        for root, names in found:
            for below in names:
                path = os.path.join(root, below)
                index = _line_starts(path)
                kept = np.flatnonzero(np.diff(index) > len("\r\n"))
                if config.heldout or split == "heldout":
                    chosen = [in_split(f"{below}:{r}", config.heldout, split) for r in kept]
                    kept = kept[np.asarray(chosen, bool)]
                rows.append(np.stack([np.full_like(kept, len(files)), kept], axis=1))
                files.append(path)
                starts.append(index)
        return cls(files, starts, np.concatenate(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        file, row = self._rows[index]
        return f"{self._files[file]}:{row + 1}"

    def __getitem__(self, index: int) -> Record:
        file, row = self._rows[index]
        start, end = self._starts[file][row : row + 2]
        where = self.where(index)
        text = utf8(_read(self._files[file], int(start), int(end)), where)
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadDocument(where, "malformed", f"not valid JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise BadDocument(where, "malformed", f"must be an object, not {_type(record)}")
        return record


def _line_starts(path: str) -> np.ndarray:
    """int64 [rows+1]: the offset of every line, then the end of the file."""
    starts, position, at_start = [], 0, True
    try:
        with _open(path) as file:
            while block := file.read(_BLOCK):
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1
                if at_start:
                    starts.append(np.asarray([position], np.int64))
                at_start = len(ends) > 0 and ends[-1] == position + len(block)
                starts.append(ends[:-1] if at_start else ends)
                position += len(block)
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return np.concatenate([*starts, np.asarray([position], np.int64)]).astype(np.int64)


def _open(path: str) -> Any:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.open(path, "rb"))
    return open(path, "rb")


def _read(path: str, start: int, end: int) -> bytes:
    if path.endswith((".gz", ".zst")):
        return _unpacked(path)[start:end]
    with open(path, "rb") as file:
        return os.pread(file.fileno(), end - start, start)


@functools.lru_cache(maxsize=16)
def _unpacked(path: str) -> bytes:
    with _open(path) as file:
        data: bytes = file.read()
        return data


def _type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
