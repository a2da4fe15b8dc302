"""Long files as several documents, so that a batch holds many files instead of a few."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from data.sources import BadDocument, Record
from data.sources.files import utf8
from data.sources.subset import Subset


class Pieces(Subset):
    """The documents of `files`, each file cut at line ends into pieces of about `piece_bytes`.

    How many pieces a file has depends on its size alone, so that opening a source reads no file. A
    piece belongs to the split of its file.
    """

    def __init__(self, files: Subset, piece_bytes: int):
        self._files, self._piece_bytes, self.duplicates = files, piece_bytes, files.duplicates
        sizes = np.asarray([os.stat(files.where(i)).st_size for i in range(len(files))], np.int64)
        self._counts = np.maximum(1, -(-sizes // piece_bytes))
        self._ends = np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - int(self._ends[file] - self._counts[file])

    def where(self, index: int) -> str:
        file, piece = self._locate(index)
        return f"{self._files.where(file)} (piece {piece + 1} of {self._counts[file]})"

    def __getitem__(self, index: int) -> Record:
        file, piece = self._locate(index)
        path = self._files.where(file)
        try:
            with open(path, "rb") as handle:
                data = handle.read()
        except OSError as error:
            raise BadDocument(path, "unreadable", f"cannot be read: {error.strerror}") from None
        last = piece + 1 == self._counts[file]
        end = len(data) if last else self._line_start(data, piece + 1)
        return {"text": utf8(data[self._line_start(data, piece) : end], self.where(index))}

    def _line_start(self, data: bytes, piece: int) -> int:
        """Where a piece begins: at the first line start not before its share of the bytes."""
        if piece == 0:
            return 0
        newline = data.find(b"\n", piece * self._piece_bytes - 1)
        return len(data) if newline < 0 else newline + 1

    def name_hashes(self) -> np.ndarray:
        return np.repeat(self._files.name_hashes(), self._counts)

    def revision(self) -> dict[str, Any]:
        return {**self._files.revision(), "piece_bytes": self._piece_bytes, "pieces": len(self)}

    def check_tokenizer(self, sha256: str, source: str) -> None:
        """Files are text."""
