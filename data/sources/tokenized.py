"""Documents that `laneformer data tokenize` encoded: token ids in memory-mapped shards.

A folder holds `manifest.json` and per shard `NAME.tokens` (uint16 or uint32, every document with its
begin and end tokens), `NAME.offsets` (int64, one more than documents: where each starts),
`NAME.bytes` (int64, of each document's text) and, for conversations, `NAME.mask` (uint8 per token, 1
where it is a target).
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from typing import Any

import numpy as np

from data.sources import Record
from data.sources.names import hash_rows
from laneformer_jax.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
PARTS = {"tokens": None, "offsets": "int64", "bytes": "int64", "mask": "uint8"}
IGNORE = -1
_KEYS = ("shards", "tokenizer_sha256", "dtype", "masked")


class TokenizedSource:
    """The documents of a tokenised folder; raises UserError from `open` when it is not whole."""

    def __init__(self, folder: str, manifest: dict[str, Any]):
        self._folder, self.manifest = folder, manifest
        self._ends = [*itertools.accumulate(s["documents"] for s in manifest["shards"])]
        self._arrays: dict[tuple[int, str], np.ndarray] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenizedSource, (self._folder, self.manifest)

    @classmethod
    def open(cls, folder: str, source: str) -> TokenizedSource:
        """Read the manifest and check that every file has the size it tells."""
        called = f"source {source!r}: {folder}"
        path = os.path.join(folder, MANIFEST)
        try:
            with open(path, encoding="utf-8") as file:
                manifest = json.load(file)
        except FileNotFoundError:
            raise UserError(
                f"{called}: holds no {MANIFEST}; it was not written by `laneformer data tokenize`,"
                " or that has not finished: run it again to go on"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{called}: {MANIFEST} cannot be read: {error}") from None
        if not isinstance(manifest, dict):
            raise UserError(f"{called}: {MANIFEST} must hold a JSON object")
        if manifest.get("format") != FORMAT:
            raise UserError(
                f"{called}: has format {manifest.get('format')}; this version reads {FORMAT}"
            )
        lacking = [key for key in _KEYS if key not in manifest]
        if lacking:
            raise UserError(f"{called}: {MANIFEST} lacks {', '.join(lacking)}; tokenise it again")
        for shard in manifest["shards"]:
            for name, size in shard["sizes"].items():
                file_path = os.path.join(folder, name)
                found = os.path.getsize(file_path) if os.path.isfile(file_path) else None
                if found != size:
                    told = "is missing" if found is None else f"has {found} bytes"
                    raise UserError(
                        f"{called}: shard {name} {told}, {size} expected; tokenise it again"
                    )
        if not manifest["shards"]:
            raise UserError(f"{called}: holds no documents")
        return cls(folder, manifest)

    def check_tokenizer(self, sha256: str, source: str) -> None:
        """Raises UserError when the folder was written with another tokenizer."""
        if self.manifest["tokenizer_sha256"] != sha256:
            raise UserError(
                f"source {source!r}: {self._folder} was tokenised with tokenizer"
                f" {self.manifest['tokenizer_sha256'][:12]}, the model's is {sha256[:12]}"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)

    def where(self, index: int) -> str:
        shard, row = self._place(index)
        return f"{self._folder}/{self.manifest['shards'][shard]['name']}, document {row}"

    def __getitem__(self, index: int) -> Record:
        shard, row = self._place(index)
        offsets = self._array(shard, "offsets")
        start, end = offsets[row], offsets[row + 1]
        ids = self._array(shard, "tokens")[start:end]
        example = np.empty((len(ids) - 1, 2), np.int32)
        example[:, 0], example[:, 1] = ids[:-1], ids[1:]
        if self.manifest["masked"]:
            mask = self._array(shard, "mask")[start + 1 : end]
            example[mask == 0, 1] = IGNORE
        return {"example": example, "bytes": int(self._array(shard, "bytes")[row])}

    def _array(self, shard: int, part: str) -> np.ndarray:
        key = (shard, part)
        if key not in self._arrays:
            name = f"{self.manifest['shards'][shard]['name']}.{part}"
            dtype = PARTS[part] or self.manifest["dtype"]
            mapped = np.memmap(os.path.join(self._folder, name), dtype, mode="r")
            self._arrays[key] = mapped.view(np.ndarray)  # slices of a memmap are slow
        return self._arrays[key]

    def name_hashes(self) -> np.ndarray:
        return hash_rows("tokenized", np.arange(len(self)))

    def revision(self) -> dict[str, Any]:
        return {"path": self._folder, "shards": [s["sha256"] for s in self.manifest["shards"]]}
