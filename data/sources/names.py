"""Hashes of documents' names, which decide what is held out."""

from __future__ import annotations

import hashlib

import numpy as np


def hash_names(names: list[str]) -> np.ndarray:
    """uint64 [len]: depends on nothing but each name."""
    digests = [
        hashlib.blake2b(n.encode("utf-8", "surrogateescape"), digest_size=8).digest() for n in names
    ]
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def hash_rows(name: str, rows: np.ndarray) -> np.ndarray:
    """uint64 like `rows`: of each row number of the file or dataset called `name`."""
    with np.errstate(over="ignore"):
        z = hash_names([name]) + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        # The finaliser of splitmix64: neighbouring rows get unrelated hashes.
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
