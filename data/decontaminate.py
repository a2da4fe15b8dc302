"""Which documents share 13 words in a row with the code benchmarks.

The benchmarks themselves are not part of this package: `benchmark_ngrams.npz` holds 64-bit hashes of
their 13-word sequences (prompts, solutions and, for MBPP, the given tests) with the task each
belongs to. `python -m data.decontaminate OUT.npz FILE…` rebuilds it from the benchmarks' JSON lines.
Of MBPP the test split is taken (tasks 11 to 510), beside all tasks of MBPP+.

A word is a run of ASCII letters, digits, underscores and non-ASCII characters, in lower case;
everything else separates words. 13 words as GPT-3 took them (Brown et al. 2020, appendix C), who
also left out sequences that many documents have. Here those without two different names (words of
two characters or more, not all digits) are left out: `0 1 2 3 4 …` and `a b c d e …` are in MBPP's
tests and in code that has nothing to do with it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

N = 13
MIN_NAMES = 2
_FILE = "benchmark_ngrams.npz"

# Every byte of a text as it is hashed: in lower case, 0 for what is in no word.
_CANONICAL = bytes(
    b | 32
    if 65 <= b <= 90
    else b
    if b in b"abcdefghijklmnopqrstuvwxyz0123456789_" or b > 127
    else 0
    for b in range(256)
)
_WORD = re.compile(rb"[^\0]+")
_NAME = re.compile(rb"(?=.*[^0-9])..+", re.DOTALL)

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_TABLE_MASK = np.uint64((1 << 20) - 1)
_BASE = 0xD6E8FEB86659FD93  # odd, so that it has an inverse modulo 2**64
_PIECE = 1 << 16  # bytes hashed at a time: the arrays of one piece stay in a core's cache


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_BASE, exponent, 1 << 64))


@functools.cache
def _powers(sign: int) -> np.ndarray:
    """uint64 [_PIECE]: powers of the base, or of its inverse, modulo 2**64."""
    out = np.full(_PIECE, _power(sign), np.uint64)
    out[0] = 1
    return np.multiply.accumulate(out)


def ngram_hashes(text: str) -> np.ndarray:
    """uint64 [max(words - 12, 0)]: a hash of every 13 words in a row."""
    words = np.concatenate([_word_hashes(piece) for piece in _pieces(_canonical(text))])
    if len(words) < N:
        return np.zeros(0, np.uint64)
    # The words as digits of a number: of 2 words, of 4, of 8, then 13 = 8 + 4 + 1.
    two = words[:-1] * _power(1) + words[1:]
    four = two[:-2] * _power(2) + two[2:]
    eight = four[:-4] * _power(4) + four[4:]
    twelve = eight[:-4] * _power(4) + four[8:]
    out = twelve[:-1] * _power(1) + words[12:]
    return (out ^ (out >> np.uint64(29))) * _MULTIPLIER


def _canonical(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass").translate(_CANONICAL)


def _pieces(data: bytes) -> Iterator[np.ndarray]:
    """uint8 arrays: `data` cut between words into at most `_PIECE` bytes; a longer word is cut."""
    start = 0
    while len(data) - start > _PIECE:
        gap = data.rfind(b"\0", start, start + _PIECE)
        end = gap + 1 if gap >= start else start + _PIECE
        yield np.frombuffer(data, np.uint8, end - start, start)
        start = end
    yield (
        np.frombuffer(data, np.uint8, offset=start) if start < len(data) else np.zeros(0, np.uint8)
    )


def _word_hashes(data: np.ndarray) -> np.ndarray:
    """uint64 [words]: each word's bytes as digits of a number, modulo 2**64, mixed."""
    inside = np.zeros(len(data) + 2, bool)
    np.not_equal(data, 0, out=inside[1:-1])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(data * _powers(1)[: len(data)], out=sums[1:])
    words = (sums[ends] - sums[starts]) * _powers(-1)[starts]
    return (words ^ (words >> np.uint64(32))) * _MULTIPLIER


def _telling(text: str) -> np.ndarray:
    """bool like `ngram_hashes`: which sequences hold at least `MIN_NAMES` different names."""
    words = _WORD.findall(_canonical(text))
    names = [word if _NAME.fullmatch(word) else None for word in words]
    found = (len({*names[i : i + N]} - {None}) for i in range(len(words) - N + 1))
    return np.fromiter((n >= MIN_NAMES for n in found), bool)


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
            found = ngram_hashes(text)[_telling(text)]
            hashes.append(found)
            owners.append(np.full(len(found), tasks.setdefault(name, len(tasks)), np.uint16))
        unique, first = np.unique(np.concatenate(hashes), return_index=True)
        return cls(unique, np.concatenate(owners)[first], tuple(tasks))

    def save(self, path: Path) -> None:
        """Write the file that `load` reads."""
        np.savez_compressed(path, hashes=self.hashes, task=self.task, tasks=np.asarray(self.tasks))

    def overlap(self, text: str) -> str | None:
        """The task that `text` shares a sequence with, or None."""
        if len(text) < 2 * N - 1:  # 13 words and what separates them
            return None
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
