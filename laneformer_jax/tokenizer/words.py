"""Encoding word by word.

Where no piece of a vocabulary reaches over a boundary between words, what stands on either side of
it is encoded by itself. The same words come again and again, so remembering their ids is several
times as fast as encoding the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

# A run reaches from one space to the next and takes the spaces in front of it; a word of ASCII is
# a part of one that is all letters or has none.
_RUNS = re.compile(r" *[^ ]+| +")
_WORDS = re.compile(r" *(?:[A-Za-z]+|[^A-Za-z ]+)| +")
_OVER_RUNS = re.compile(r"[^ ] ")
_OVER_WORDS = re.compile(r"[A-Za-z][^A-Za-z ]|[^A-Za-z ][A-Za-z]")

_REMEMBERED = 1 << 17  # runs, and as many words: some 40 MB in all
_LONGEST = 64  # characters of what is remembered


class WordEncoder:
    """Encodes text word by word.

    Args:
        encode: the ids of a part of a text that does not stand at its beginning.
        in_words: cut runs of ASCII into words.
    """

    def __init__(self, encode: Callable[[str], list[int]], in_words: bool):
        def whole(part: str) -> bytes:
            return np.asarray(encode(part), np.int32).tobytes()

        words = _Memory(whole)

        def run(part: str) -> bytes:
            if not part.isascii():
                return whole(part)
            return b"".join(map(words.__getitem__, _WORDS.findall(part)))

        self._runs = _Memory(run if in_words else whole)

    @classmethod
    def of(cls, pieces: Iterable[str], encode: Callable[[str], list[int]]) -> WordEncoder | None:
        """For a vocabulary of `pieces`; None if one of them reaches over a space."""
        in_words = True
        for piece in pieces:
            if _OVER_RUNS.search(piece):
                return None
            in_words = in_words and not (piece.isascii() and _OVER_WORDS.search(piece))
        return cls(encode, in_words)

    def __call__(self, text: str) -> np.ndarray:
        """int32 [n]: the ids of `text`."""
        parts = bytearray().join(map(self._runs.__getitem__, _RUNS.findall(text)))
        return np.frombuffer(parts, np.int32)


def first_run(text: str) -> str:
    """What of `text` may depend on standing at its beginning."""
    match = _RUNS.match(text)
    return match[0] if match else ""


class _Memory(dict[str, bytes]):
    def __init__(self, encode: Callable[[str], bytes]):
        super().__init__()
        self._encode = encode

    def __missing__(self, part: str) -> bytes:
        ids = self._encode(part)
        if len(self) < _REMEMBERED and len(part) <= _LONGEST:
            self[part] = ids
        return ids
