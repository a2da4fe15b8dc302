"""Opening sources: which documents are in a split, and which repeat another."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from data.config import SourceConfig
from data.sources import BadDocument, Source, Split
from data.sources.pieces import Pieces
from data.sources.subset import Subset
from data.sources.tokenized import TokenizedSource
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file


def open_source(
    name: str,
    config: SourceConfig,
    split: Split = "train",
    deduplicate: bool = False,
    cache_dir: str | None = None,
) -> Subset:
    """The documents of a source that belong to a split.

    Args:
        name: the source's name in the mixture, for errors.
        config: what to open.
        split: `train` without the held-out documents, `heldout` only those, or `all`.
        deduplicate: keep only the first of the documents with the same text; the split is taken
            first, so a held-out document is judged among its like.
        cache_dir: where the text hashes of a large source are kept.

    Raises:
        UserError: nothing to read, or the split is empty.
    """
    source = _open(name, config, cache_dir)
    if split == "all" or (split == "train" and not config.heldout):
        indices = np.arange(len(source), dtype=np.int64)
    else:
        held = source.name_hashes() < np.uint64(int(config.heldout * 2**64))
        indices = np.flatnonzero(held == (split == "heldout"))
    found = len(indices)
    if deduplicate and found:
        indices = _first_of_each(source, config, indices, cache_dir)
    if not len(indices):
        share = f" (heldout = {config.heldout})" if split == "heldout" else ""
        raise UserError(f"source {name!r}: holds no documents in split {split!r}{share}")
    subset = Subset(source, indices, found - len(indices))
    if config.piece_bytes is None:
        return subset
    return Pieces(subset, config.piece_bytes)


def _open(name: str, config: SourceConfig, cache_dir: str | None) -> Source:
    if config.kind == "text":
        from data.sources.files import TextFiles

        return TextFiles.find(name, config)
    if config.kind == "jsonl":
        from data.sources.jsonl import JsonLines

        return JsonLines.find(name, config, cache_folder(cache_dir))
    if config.kind in ("parquet", "hub"):
        from data.sources.hub import HubRows

        return HubRows.load(name, config)
    if config.kind == "array_record":
        from data.sources.array_record import ArrayRecords

        return ArrayRecords.find(name, config)
    if config.kind == "tokenized":
        return TokenizedSource.open(str(config.path), name)
    if config.kind == "stdlib":
        from data.sources.stdlib import stdlib_files

        return stdlib_files(config)
    from data.sources.stdlib import StdlibPairs

    return StdlibPairs.cut(config)


def text_hash(record: Mapping[str, Any], config: SourceConfig) -> bytes:
    """16 bytes that are equal for records with the same text."""
    values = [record.get(column) for column in config.text_columns]
    if len(values) == 1 and isinstance(values[0], str):
        data = values[0].encode("utf-8", "surrogatepass")
    else:
        data = json.dumps(values, sort_keys=True, default=str).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def cache_folder(cache_dir: str | None) -> str:
    """`cache_dir`, or `laneformer` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return cache_dir or os.path.join(base, "laneformer")


_CACHED_FROM = 50_000  # documents: fewer are hashed again each time


def _first_of_each(
    source: Source, config: SourceConfig, indices: np.ndarray, cache_dir: str | None
) -> np.ndarray:
    """`indices` without those whose text an earlier one has, in the same order."""
    from data.sources.files import TextFiles

    if isinstance(source, TextFiles):
        return source.first_of_each(indices)
    if config.kind in ("stdlib_pairs", "tokenized"):
        return indices  # pairs differ by their place; shards were deduplicated when written
    hashes = _text_hashes(source, config, cache_dir)[indices]
    _, first = np.unique(hashes, return_index=True)
    return indices[np.sort(first)]


def _text_hashes(source: Source, config: SourceConfig, cache_dir: str | None) -> np.ndarray:
    """V16 [len] of every document; those that cannot be read count as different."""
    key = hashlib.sha256(
        json.dumps([source.revision(), config.text_columns], sort_keys=True).encode()
    ).hexdigest()[:32]
    path = os.path.join(cache_folder(cache_dir), "text-hashes", f"{key}.npy")
    if len(source) >= _CACHED_FROM and os.path.isfile(path):
        cached = np.load(path)
        if len(cached) == len(source):
            return cached
    out = bytearray()
    for i in range(len(source)):
        try:
            out += text_hash(source[i], config)
        except BadDocument:
            out += b"bad document" + i.to_bytes(4, "big")
    hashes = np.frombuffer(bytes(out), dtype="V16")
    if len(source) >= _CACHED_FROM:
        with atomic_file(path, "wb") as file:
            np.save(file, hashes)
    return hashes
