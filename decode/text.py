"""Tokens to text as they come: the parts joined are what all tokens decode to, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import Tokenizer

MOST_STOPS = 16
LONGEST_STOP = 1024  # characters


class TextStream:
    """The text of one answer.

    Stop strings are looked for in the text, so it does not matter how tokens cut it: one may begin or
    end inside a token, or with a character that takes several tokens. What may yet turn out to begin a
    stop string is held back. The answer ends before the stop string that is complete first, as if the
    text came character by character; of several complete at once, before the longest.

    Attributes:
        given: characters given out.
        decoded: characters that the tokens decoded to, whether given out, held back or cut off.
        stopped: a stop string was found; nothing follows.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        # A model may have more ids than its tokenizer. They have no text.
        self._vocab_size = tokenizer.vocab_size
        self._decoder = tokenizer.stream()
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=1)
        self._held = ""
        self.given = 0
        self.decoded = 0
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" once a stop string was found."""
        if self.stopped or token_id >= self._vocab_size:
            return ""
        return self._give(self._decoder.push(token_id))

    def flush(self) -> str:
        """The rest, when no token follows."""
        if self.stopped:
            return ""
        text = self._give(self._decoder.flush())
        if not self.stopped:
            text += self._held
            self.given += len(self._held)
            self._held = ""
        return text

    def _give(self, new: str) -> str:
        self.decoded += len(new)
        text = self._held + new
        cut = _first_complete(text, self._stop, len(self._held))
        if cut is None:
            cut = len(text) - self._beginning(text)
        else:
            self.stopped = True
        text, self._held = text[:cut], text[cut:]
        self.given += len(text)
        return text

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stop):
                return size
        return 0


def _first_complete(text: str, stops: Sequence[str], seen: int) -> int | None:
    """Where the stop string that ends first in `text` begins; none ends in its first `seen` characters."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, seen + 1 - len(stop)))
        if start >= 0:
            found.append((start + len(stop), start))
    return min(found)[1] if found else None


def checked_stops(stop: Sequence[str], name: str = "stop") -> tuple[str, ...]:
    """`stop` as a tuple. Raises UserError: an empty string, too long a one, or too many."""
    stops = tuple(stop)
    if len(stops) > MOST_STOPS:
        raise UserError(f"{name}: {len(stops)} strings; at most {MOST_STOPS}")
    for text in stops:
        if not text:
            raise UserError(f"{name}: a stop string is empty and would end every answer at once")
        if len(text) > LONGEST_STOP:
            raise UserError(f"{name}: a string of {len(text)} characters; at most {LONGEST_STOP}")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError(f"{name}: {text!r} holds a lone surrogate, which no answer can")
    return stops
