"""Text on a terminal, and a line of figures below it."""

from __future__ import annotations

import os
from types import TracebackType
from typing import IO

_LEAST_LINES = 4
# A model can write anything; escape sequences would move the cursor or set the title.
_SHOWN = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)


def is_terminal(out: IO[str]) -> bool:
    """Whether `out` shows a person what is written, and can move its cursor."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def printable(text: str) -> str:
    """`text` with its control characters, but for tab and newline, as visible ones."""
    return text.translate(_SHOWN)


class Screen:
    """Text above, one line at the foot of the terminal below, which does not scroll.

    Use it as a context manager: it leaves the terminal as it was.
    """

    def __init__(self, out: IO[str]):
        self._out = out
        self._lines = 0

    def __enter__(self) -> Screen:
        self._fit()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lines:
            self._out.write(f"\x1b7\x1b[r\x1b[{self._lines};1H\x1b[2K\x1b8")
            self._out.flush()

    def write(self, text: str) -> None:
        """Text where the last text ended."""
        self._out.write(printable(text))

    def status(self, text: str) -> None:
        """Show `text` in the line below."""
        self._fit()
        if self._lines:
            shown = text[: self._columns - 1]
            self._out.write(f"\x1b7\x1b[{self._lines};1H\x1b[2K\x1b[2m{shown}\x1b[0m\x1b8")
        self._out.flush()

    def _fit(self) -> None:
        """Keep the last line out of what scrolls, at the size the window now has."""
        size = os.get_terminal_size(self._out.fileno())
        self._columns = size.columns
        if size.lines == self._lines:
            return
        if size.lines < _LEAST_LINES:
            if self._lines:
                self._out.write("\x1b7\x1b[r\x1b8")
            self._lines = 0
            return
        self._lines = size.lines
        # The newline makes room when the cursor stands in the last line.
        self._out.write(f"\n\x1b7\x1b[1;{self._lines - 1}r\x1b8\x1b[1A")
