"""JSON lines, plain or compressed: every line is one document."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from data.config import SourceConfig
from data.sources import Record, json_object
from data.sources.files import expand, file_revision, utf8
from data.sources.names import hash_rows
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file

_BLOCK = 16 << 20
_INDEX_KEPT_FROM = 256 << 20  # bytes: smaller files are indexed again each time


class JsonLines:
    """Rows of one or more files, in the order of the files' paths and of their lines.

    Rows are read through an index of line starts. A compressed file is unpacked once into the
    cache, so that reading it does not hold it in memory.

    Args:
        files: paths of plain files.
        names: what errors call them, and held-out hashes are taken of.
        starts: per file, int64 [rows+1]: where each row starts, and the end of the last.
    """

    def __init__(self, files: Sequence[str], names: Sequence[str], starts: Sequence[np.ndarray]):
        self._files, self._names, self._starts = list(files), list(names), list(starts)
        # Empty lines are no documents: a row has more than a line end.
        self._rows = [np.flatnonzero(np.diff(s) > len("\r\n")) for s in self._starts]
        self._ends = np.cumsum([len(rows) for rows in self._rows])

    @classmethod
    def find(cls, name: str, config: SourceConfig, cache: str) -> JsonLines:
        """Index what `config` names; `cache` is a folder for indexes and unpacked files."""
        found = [pair for path in config.paths for pair in expand(name, path, config.pattern)]
        files, names, starts = [], [], []
        for root, below in found:
            for relative in below:
                path = os.path.join(root, relative)
                packed = path.endswith((".gz", ".zst"))
                plain = _unpacked(path, cache, name) if packed else path
                files.append(plain)
                names.append(path)
                starts.append(_line_starts(plain, cache))
        return cls(files, names, starts)

    def _place(self, index: int) -> tuple[int, int]:
        """File and line of a document."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, int(self._rows[file][index - (self._ends[file - 1] if file else 0)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def where(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self._names[file]}:{row + 1}"

    def __getitem__(self, index: int) -> Record:
        file, row = self._place(index)
        start, end = map(int, self._starts[file][row : row + 2])
        where = f"{self._names[file]}:{row + 1}"
        with open(self._files[file], "rb", buffering=0) as lines:
            text = utf8(os.pread(lines.fileno(), end - start, start), where)
        return json_object(text, where)

    def name_hashes(self) -> np.ndarray:

        parts = [
            hash_rows(os.path.basename(name), rows)
            for name, rows in zip(self._names, self._rows, strict=True)
        ]
        return np.concatenate(parts)

    def revision(self) -> dict[str, Any]:
        return {"files": file_revision(self._names)}


def _line_starts(path: str, cache: str) -> np.ndarray:
    """int64 [rows+1]: the offset of every line, then the end of the file; kept for large files."""
    if os.path.getsize(path) < _INDEX_KEPT_FROM:
        return _scan(path)
    kept = _cache_path(path, cache, ".lines.npy")
    if not os.path.isfile(kept):
        starts = _scan(path)
        with atomic_file(kept, "wb") as file:
            np.save(file, starts)
    return np.load(kept, mmap_mode="r")


def _scan(path: str) -> np.ndarray:
    starts, position, at_start = [], 0, True
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1
            if at_start:
                starts.append(np.asarray([position], np.int64))
            at_start = len(ends) > 0 and ends[-1] == position + len(block)
            starts.append(ends[:-1] if at_start else ends)
            position += len(block)
    return np.concatenate([*starts, np.asarray([position], np.int64)]).astype(np.int64)


def _unpacked(path: str, cache: str, source: str) -> str:
    """The path of `path` without its compression."""
    plain = _cache_path(path, cache, ".jsonl")
    if not os.path.isfile(plain):
        unpack = _gzip_blocks if path.endswith(".gz") else _zstandard_blocks
        try:
            with open(path, "rb") as packed, atomic_file(plain, "wb") as file:
                for block in unpack(packed):
                    file.write(block)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(f"source {source!r}: {path}: cannot be unpacked: {error}") from None
    return plain


def _gzip_blocks(packed: BinaryIO) -> Iterator[bytes]:
    with gzip.open(packed, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _zstandard_blocks(packed: BinaryIO) -> Iterator[bytes]:
    """Frame after frame; the library's own reader is silent about a cut-off end."""
    import zstandard

    frame = None
    while data := packed.read(_BLOCK):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends inside a frame")


def _cache_path(path: str, cache: str, ending: str) -> str:
    key = hashlib.sha256(json.dumps(file_revision([os.path.abspath(path)])).encode()).hexdigest()
    return os.path.join(cache, "jsonl", key[:32] + ending)
