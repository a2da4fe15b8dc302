"""Encoding word by word, with arrays.

Where no piece of a vocabulary reaches over a boundary between words, what stands on either side of
it is encoded by itself. The same words come again and again, so their ids are kept in a table, in
which numpy looks up all words of a text at once: several times as fast as encoding the text.

A word begins with the spaces in front of it, and between ASCII letters and other ASCII characters.
Words are told apart by 64-bit hashes, of a base that each process draws anew, so that no text can
be made to collide.

Legend: n bytes of a text, w words, t tokens.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

_SPACE, _LETTER, _OTHER, _BEYOND = range(4)  # of a byte; the last is a part of what is not ASCII
_KINDS = bytes(
    _SPACE if b == 32 else _BEYOND if b > 127 else _LETTER if chr(b).isalpha() else _OTHER
    for b in range(256)
)
_OVER_SPACE = re.compile(r"[^ ] ")
_OVER_KIND = re.compile(r"[A-Za-z][^A-Za-z \x80-\U0010ffff]|[^A-Za-z \x80-\U0010ffff][A-Za-z]")
_FIRST = re.compile(r" *[^ ]+| +")

_PIECE = 1 << 15  # bytes looked up at a time: their arrays stay in a core's cache
_LONGEST = 64  # bytes of a word that is kept
_SLOT_BITS = 20
_SLOTS, _PROBES = 1 << _SLOT_BITS, 16
_MAX_WORDS, _MAX_IDS = _SLOTS // 4, 1 << 22  # beyond either, all is forgotten; some 32 MB


class WordEncoder:
    """Encodes text word by word. Any number of threads may call it.

    Args:
        encode: the ids of each of many parts of texts that do not stand at their beginning.
        between_kinds: words begin between letters and what is none, not only at spaces.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], between_kinds: bool):
        self._encode = encode
        # By the kinds of two neighbours, as 4 times the first and the second.
        self._begins_between = np.zeros(16, bool)
        self._begins_between[[4 * kind + _SPACE for kind in (_LETTER, _OTHER, _BEYOND)]] = True
        self._begins_between[[4 * _LETTER + _OTHER, 4 * _OTHER + _LETTER]] = between_kinds
        base = secrets.randbits(64) | 1  # odd, so that it has an inverse
        self._powers, self._inverse = _powers(base), _powers(pow(base, -1, 1 << 64))
        self._lock = threading.Lock()
        # The table: hash of a word, where its ids begin and how many they are; `_used` are taken.
        self._keys: np.ndarray
        self._begins: np.ndarray
        self._counts: np.ndarray
        self._ids: np.ndarray
        self._words: int
        self._used: int
        self._forget()

    @classmethod
    def of(
        cls, pieces: Sequence[str], encode: Callable[[list[str]], list[list[int]]]
    ) -> WordEncoder | None:
        """For a vocabulary of `pieces`; None if one of them reaches over a space."""
        if any(map(_OVER_SPACE.search, pieces)):
            return None
        return cls(encode, not any(map(_OVER_KIND.search, pieces)))

    def __call__(self, text: str) -> np.ndarray:
        """int32 [t]: the ids of `text`."""
        with self._lock:
            parts = [self._part(*part) for part in self._parts(text.encode())]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def _parts(self, data: bytes) -> Iterator[tuple[bytes, np.ndarray]]:
        """`data` cut between words, each part with where its words start."""
        kinds_n = np.frombuffer(data.translate(_KINDS), np.uint8)
        cuts = np.flatnonzero(self._begins_between[4 * kinds_n[:-1] + kinds_n[1:]]) + 1
        bounds = np.concatenate([[0], cuts, [len(data)]])
        first = 0
        while first < len(bounds) - 1 and data:
            start = int(bounds[first])
            last = int(np.searchsorted(bounds, start + _PIECE, side="right")) - 1
            last = max(last, first + 1)  # a word that is longer than a piece is one by itself
            yield data[start : bounds[last]], bounds[first:last] - start
            first = last

    def _part(self, data: bytes, starts_w: np.ndarray) -> np.ndarray:
        """The ids of `data`, whose words start at `starts_w`."""
        if len(data) > _PIECE:
            return np.asarray(self._encode([data.decode()])[0], np.int32)
        if self._words > _MAX_WORDS or self._used > _MAX_IDS:
            self._forget()
        ends_w = np.append(starts_w[1:], len(data))
        slots_w, hashes_w = self._find(data, starts_w, ends_w)
        begins_w, counts_w = self._begins[slots_w], self._counts[slots_w]
        missing = np.flatnonzero(slots_w < 0)
        if len(missing):
            _, first, which = np.unique(hashes_w[missing], return_index=True, return_inverse=True)
            new = missing[first]
            places = zip(starts_w[new].tolist(), ends_w[new].tolist(), strict=True)
            words = [data[start:end].decode() for start, end in places]
            begins, counts = self._keep(hashes_w[new], words)
            begins_w[missing], counts_w[missing] = begins[which], counts[which]
        ends_in_t = np.cumsum(counts_w)
        to_ids = np.repeat(begins_w - ends_in_t + counts_w, counts_w)
        return self._ids[to_ids + np.arange(len(to_ids))]

    def _find(
        self, data: bytes, starts_w: np.ndarray, ends_w: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each word's place in the table, -1 for none, and its hash."""
        # A word is a number whose digits are its bytes, counted from 1: a zero would add nothing.
        digits_n = np.add(np.frombuffer(data, np.uint8), 1, dtype=np.uint64)
        sums = np.zeros(len(data) + 1, np.uint64)
        np.cumsum(digits_n * self._powers[: len(data)], out=sums[1:])
        hashes_w = (sums[ends_w] - sums[starts_w]) * self._inverse[starts_w]
        hashes_w = (hashes_w ^ (hashes_w >> np.uint64(32))) * _MULTIPLIER
        long = np.flatnonzero(ends_w - starts_w > _LONGEST)
        hashes_w[long] = np.arange(1, len(long) + 1)  # different, and never in the table
        slots_w = (hashes_w >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)
        wrong = np.flatnonzero(self._keys[slots_w] != hashes_w)
        for _ in range(_PROBES - 1):
            # An empty slot ends the search.
            there = self._keys[slots_w[wrong]]
            slots_w[wrong[there == 0]] = -1
            wrong = wrong[there != 0]
            if not len(wrong):
                break
            slots_w[wrong] = (slots_w[wrong] + 1) % _SLOTS
            wrong = wrong[self._keys[slots_w[wrong]] != hashes_w[wrong]]
        slots_w[wrong] = -1
        return slots_w, hashes_w

    def _keep(self, hashes: np.ndarray, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode new words and put them into the table; where their ids begin, and how many."""
        ids = self._encode(words)
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        begins = self._used + np.cumsum(counts) - counts
        used = self._used + int(counts.sum())
        while used > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._ids[self._used : used] = list(chain.from_iterable(ids))
        for i, key in enumerate(hashes.tolist()):
            if key <= _PIECE:  # a long word
                continue
            slot = key >> (64 - _SLOT_BITS)
            for place in range(slot, slot + _PROBES):
                if not self._keys[place % _SLOTS]:
                    self._keys[place % _SLOTS] = key
                    self._begins[place % _SLOTS] = begins[i]
                    self._counts[place % _SLOTS] = counts[i]
                    break
        self._used, self._words = used, self._words + len(words)
        return begins, counts

    def _forget(self) -> None:
        self._keys = np.zeros(_SLOTS, np.uint64)
        self._begins, self._counts = np.zeros(_SLOTS, np.int64), np.zeros(_SLOTS, np.int64)
        self._ids = np.zeros(1 << 16, np.int32)
        self._words = self._used = 0


def first_word(text: str) -> str:
    """What of `text` depends on standing at its beginning, if no piece reaches over a space."""
    match = _FIRST.match(text)
    return match[0] if match else ""


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def _powers(base: int) -> np.ndarray:
    """uint64 [_PIECE]: powers of `base` modulo 2**64."""
    out = np.full(_PIECE, base, np.uint64)
    out[0] = 1
    return np.multiply.accumulate(out)
