"""ArrayRecord files: every record, a JSON object in UTF-8, is one document."""

from __future__ import annotations

import os
from typing import Any

import grain
import numpy as np

from data.config import SourceConfig
from data.sources import Record, json_object
from data.sources.files import expand, file_revision, utf8
from data.sources.names import hash_rows
from laneformer_jax.errors import UserError


class ArrayRecords:
    """Records of one or more files, in the order of the files' paths.

    Args:
        files: paths; `names` are what held-out hashes are taken of.
    """

    def __init__(self, files: list[str], names: list[str]):
        self._files, self._names = files, names
        self._open()

    def _open(self) -> None:
        lengths = []
        for file in self._files:
            try:
                lengths.append(len(grain.sources.ArrayRecordDataSource([file])))
            except Exception as error:  # the reader raises what its C++ side says
                reason = " ".join(str(error).split())[:200]
                raise UserError(f"{file}: is not a complete ArrayRecord file: {reason}") from None
        self._ends = np.cumsum(lengths)
        self._records = grain.sources.ArrayRecordDataSource(self._files)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayRecords, (self._files, self._names)

    @classmethod
    def find(cls, source: str, config: SourceConfig) -> ArrayRecords:
        """List what `config` names. Raises UserError for none, or one that is cut off."""
        found = [pair for path in config.paths for pair in expand(source, path, config.pattern)]
        names = [name for _, below in found for name in below]
        files = [os.path.join(root, n) for root, below in found for n in below]
        try:
            return cls(files, names)
        except UserError as error:
            raise UserError(f"source {source!r}: {error}") from None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)

    def where(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self._files[file]}, record {row}"

    def __getitem__(self, index: int) -> Record:
        where = self.where(index)
        return json_object(utf8(self._records[index], where), where)

    def name_hashes(self) -> np.ndarray:

        starts = [0, *self._ends[:-1]]
        parts = [
            hash_rows(name, np.arange(end - start))
            for name, start, end in zip(self._names, starts, self._ends, strict=True)
        ]
        return np.concatenate(parts)

    def revision(self) -> dict[str, Any]:
        return {"files": file_revision(self._files)}
