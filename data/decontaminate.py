"""Which documents share 13 words in a row with the code benchmarks.

The benchmarks themselves are not part of this package: `benchmark_ngrams.npz` holds 64-bit hashes of
their 13-word sequences (prompts, solutions and, for MBPP, the given tests) with the task each
belongs to. `python -m data.decontaminate OUT.npz FILE…` rebuilds it from the benchmarks' JSON lines.
Of MBPP the test split is taken (tasks 11 to 510), beside all tasks of MBPP+.

A word is a run of ASCII letters, digits, underscores and non-ASCII characters, in lower case;
everything else separates words.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

N = 13
_FILE = "benchmark_ngrams.npz"

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_TABLE_MASK = np.uint64((1 << 20) - 1)
_LOWER = np.arange(256, dtype=np.uint8)
_LOWER[ord("A") : ord("Z") + 1] += 32
_IN_WORD = np.zeros(256, bool)
for _c in b"abcdefghijklmnopqrstuvwxyz0123456789_":
    _IN_WORD[_c] = True
_IN_WORD[128:] = True


_BASE = 0xD6E8FEB86659FD93  # odd, so that it has an inverse modulo 2**64
_PIECE = 1 << 20  # bytes hashed at a time


@functools.cache
def _powers(base: int) -> np.ndarray:
    """uint64 [_PIECE]: powers of `base` modulo 2**64."""
    out = np.full(_PIECE, base, np.uint64)
    out[0] = 1
    with np.errstate(over="ignore"):
        return np.multiply.accumulate(out)


def ngram_hashes(text: str) -> np.ndarray:
    """uint64 [max(words - 12, 0)]: a hash of every 13 words in a row."""
    data = _LOWER[np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)]
    words = np.concatenate([_word_hashes(piece) for piece in _pieces(data)])
    count = len(words) - N + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        out = words[:count].copy()
        for j in range(1, N):
            out *= np.uint64(_BASE)
            out += words[j : j + count]
        return (out ^ (out >> np.uint64(29))) * _MULTIPLIER


def _pieces(data: np.ndarray) -> Iterable[np.ndarray]:
    """`data` cut between words into parts of at most `_PIECE` bytes; a longer word is cut too."""
    start = 0
    while len(data) - start > _PIECE:
        gaps = np.flatnonzero(~_IN_WORD[data[start : start + _PIECE]])
        end = start + (int(gaps[-1]) + 1 if len(gaps) else _PIECE)
        yield data[start:end]
        start = end
    yield data[start:]


def _word_hashes(data: np.ndarray) -> np.ndarray:
    """uint64 [words]: each word's bytes as digits of a number, modulo 2**64, mixed."""
    inside = _IN_WORD[data]
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    with np.errstate(over="ignore"):
        sums = np.zeros(len(data) + 1, np.uint64)
        np.cumsum(data * _powers(_BASE)[: len(data)], out=sums[1:])
        words = (sums[ends] - sums[starts]) * _powers(pow(_BASE, -1, 1 << 64))[starts]
        return (words ^ (words >> np.uint64(32))) * _MULTIPLIER


@dataclass(frozen=True)
class Benchmarks:
    """The benchmarks' sequences.

    Attributes:
        hashes: uint64 [n], sorted, no value twice.
        task: index into `tasks` of the first task with each.
        tasks: task names, such as `HumanEval/3`.
    """

    hashes: np.ndarray
    task: np.ndarray
    tasks: tuple[str, ...]

    @classmethod
    def load(cls) -> Benchmarks:
        """What is shipped with this package."""
        return _shipped()

    @classmethod
    def build(cls, texts: Iterable[tuple[str, str]]) -> Benchmarks:
        """From `(task, text)` pairs; a task may come more than once."""
        tasks: dict[str, int] = {}
        hashes, owners = [], []
        for name, text in texts:
            found = ngram_hashes(text)
            hashes.append(found)
            owners.append(np.full(len(found), tasks.setdefault(name, len(tasks)), np.uint16))
        unique, first = np.unique(np.concatenate(hashes), return_index=True)
        return cls(unique, np.concatenate(owners)[first], tuple(tasks))

    def save(self, path: Path) -> None:
        """Write the file that `load` reads."""
        np.savez_compressed(path, hashes=self.hashes, task=self.task, tasks=np.asarray(self.tasks))

    def overlap(self, text: str) -> str | None:
        """The task that `text` shares a sequence with, or None."""
        found = ngram_hashes(text)
        # Nearly every sequence is in no benchmark: a small table tells that faster than a search.
        found = found[self._may_hold[found & _TABLE_MASK]]
        if not len(found):
            return None
        places = np.searchsorted(self.hashes, found)
        places[places == len(self.hashes)] = 0
        hits = np.flatnonzero(self.hashes[places] == found)
        return self.tasks[int(self.task[places[hits[0]]])] if len(hits) else None

    @functools.cached_property
    def _may_hold(self) -> np.ndarray:
        """bool [2**20]: by a hash's low bits, False where no benchmark has it."""
        table = np.zeros(int(_TABLE_MASK) + 1, bool)
        table[self.hashes & _TABLE_MASK] = True
        return table

    def __reduce__(self) -> tuple[object, ...]:
        if self is _shipped():
            return Benchmarks.load, ()
        return Benchmarks, (self.hashes, self.task, self.tasks)


@functools.cache
def _shipped() -> Benchmarks:
    with (resources.files("data") / _FILE).open("rb") as file:
        stored = np.load(file)
        return Benchmarks(stored["hashes"], stored["task"], tuple(stored["tasks"].tolist()))


def benchmark_texts(path: Path) -> Iterable[tuple[str, str]]:
    """`(task, text)` of a HumanEval(+) or MBPP(+) JSON lines file, plain or `.gz`."""
    import gzip
    import json

    data = path.read_bytes()
    lines = gzip.decompress(data) if path.suffix == ".gz" else data
    for line in lines.splitlines():
        row = json.loads(line)
        name = str(row["task_id"])
        if "text" in row:
            # MBPP itself: only its test split, or its training split could not be trained on.
            if not 11 <= int(name) <= 510:
                continue
            name = f"Mbpp/{name}"
            yield name, row["text"]
            yield name, row["code"]
            yield name, "\n".join(row["test_list"])
        else:
            name = name if "/" in name else f"Mbpp/{name}"
            yield name, row["prompt"] + row.get("canonical_solution", row.get("code", ""))


def main(out: str, *files: str) -> None:
    """Build the shipped file from the benchmarks."""
    found = Benchmarks.build(pair for file in files for pair in benchmark_texts(Path(file)))
    found.save(Path(out))
    print(f"{out}: {len(found.hashes)} sequences of {len(found.tasks)} tasks")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
