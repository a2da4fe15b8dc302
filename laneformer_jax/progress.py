"""Progress with time left: a bar on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

PLAIN_INTERVAL_S = 10.0


class Progress(Protocol):
    """What `progress` gives its block."""

    def advance(self, n: int = 1, **fields: Any) -> None:
        """Count `n` more units; `fields` (such as `loss=2.31`) are shown beside the count."""


class Quiet:
    """Progress that shows nothing, for processes beside the one that does."""

    def advance(self, n: int = 1, **fields: Any) -> None: ...


@contextmanager
def progress(
    total: int | None, description: str, unit: str = "it", start: int = 0
) -> Iterator[Progress]:
    """Show how far a loop is and how long it still takes.

    Args:
        total: units in all, or None when unknown (then no time left is shown).
        description: a few words naming the work.
        unit: plural name of what is counted, such as `steps`.
        start: units already done before this process; they do not enter the rate.
    """
    if sys.stderr.isatty():
        with _bar(total, description, unit, start) as bar:
            yield bar
        return
    lines = _Lines(total, description, unit, start)
    yield lines
    lines.close()


@contextmanager
def _bar(total: int | None, description: str, unit: str, start: int) -> Iterator[Progress]:
    from rich import progress as rp
    from rich.console import Console

    columns = (
        rp.TextColumn("{task.description}"),
        rp.BarColumn(),
        rp.MofNCompleteColumn(),
        rp.TextColumn("{task.fields[unit]}"),
        rp.TimeElapsedColumn(),
        rp.TextColumn("ETA"),
        rp.TimeRemainingColumn(elapsed_when_finished=False),
        rp.TextColumn("{task.fields[shown]}"),
    )
    with rp.Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(description, total=total, completed=start, unit=unit, shown="")
        yield _Bar(display, task)


class _Bar:
    def __init__(self, display: Any, task: Any):
        self._display, self._task = display, task

    def advance(self, n: int = 1, **fields: Any) -> None:
        if fields:
            self._display.update(self._task, advance=n, shown=_show(fields))
        else:
            self._display.update(self._task, advance=n)


class _Lines:
    """First, last, and in between at most one line per `PLAIN_INTERVAL_S` seconds."""

    def __init__(self, total: int | None, description: str, unit: str, start: int):
        self._total, self._description, self._unit = total, description, unit
        self._start = self._done = self._printed = start
        self._began = self._last = time.monotonic()
        self._fields: dict[str, Any] = {}
        self._first = True

    def advance(self, n: int = 1, **fields: Any) -> None:
        self._done += n
        self._fields = fields or self._fields
        if self._first or time.monotonic() - self._last >= PLAIN_INTERVAL_S:
            self._print()

    def close(self) -> None:
        if self._done != self._printed:
            self._print()

    def _print(self) -> None:
        now = time.monotonic()
        elapsed = now - self._began
        counted = self._done - self._start
        count = f"{self._done}" if self._total is None else f"{self._done}/{self._total}"
        parts = [f"{self._description}: {count} {self._unit}", f"{_clock(elapsed)} elapsed"]
        left = 0 if self._total is None else self._total - self._done
        if left > 0 and counted > 0:
            parts.append(f"ETA {_clock(elapsed / counted * left)}")
        if self._fields:
            parts.append(_show(self._fields))
        print(", ".join(parts), file=sys.stderr, flush=True)
        self._first, self._last, self._printed = False, now, self._done


def _show(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in fields.items()
    )


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
