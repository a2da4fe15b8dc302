"""Some documents of a source: those of a split, without repeats."""

from __future__ import annotations

from typing import Any

import numpy as np

from data.sources import Record, Source
from data.sources.tokenized import TokenizedSource


class Subset:
    """Some documents of a source.

    Attributes:
        duplicates: how many documents of the split were left out as repeats.
    """

    def __init__(self, source: Source, indices: np.ndarray, duplicates: int = 0):
        self._source, self._indices, self.duplicates = source, indices, duplicates

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:
        return self._source[int(self._indices[index])]

    def where(self, index: int) -> str:
        return self._source.where(int(self._indices[index]))

    def name_hashes(self) -> np.ndarray:
        return self._source.name_hashes()[self._indices]

    def revision(self) -> dict[str, Any]:
        return self._source.revision()

    def check_tokenizer(self, sha256: str, source: str) -> None:
        """Raises UserError when the documents are token ids of another tokenizer."""
        if isinstance(self._source, TokenizedSource):
            self._source.check_tokenizer(sha256, source)
