"""The queue, and the thread that works on it: one job at a time, in the order they came.

A job lives on two threads. The event loop makes it, reads its events and may cancel it; the worker
runs the engine. Whatever happens, a job's events end with exactly one `End`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from decode.complete import Ask, Step, complete
from decode.engine import Engine
from decode.server.errors import ApiError, internal, shutting_down
from decode.server.metrics import Metrics
from laneformer_jax.tokenizer import Tokenizer

_log = logging.getLogger("laneformer.serve")


class Part(NamedTuple):
    """A step of the answer to one of a job's prompts."""

    prompt: int
    step: Step


class End(NamedTuple):
    """Nothing follows. `error` is None when the answer is whole."""

    outcome: str  # stop, length, cancelled, shutdown or error
    error: ApiError | None


class Speed:
    """How fast one answer comes: the first sample of a request's first prompt."""

    def __init__(self) -> None:
        self.first: float | None = None  # when its first token came
        self._last = 0.0
        self._after = 0  # tokens that came later than the first burst

    def note(self, drawn: int) -> None:
        """`drawn` more tokens have come."""
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        else:
            self._after += drawn
            self._last = now

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first burst; None when there was only that one."""
        if self.first is None or not self._after:
            return None
        return self._after / (self._last - self.first)


@dataclass(eq=False)
class Job:
    """Prompts to answer, one after the other, and what has come of them."""

    asks: Sequence[Ask]
    endpoint: str
    received: float  # time.perf_counter()
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[Part | End] = field(default_factory=asyncio.Queue)
    started: float | None = None
    drawn: int = 0
    speed: Speed = field(default_factory=Speed)
    cancelled: str | None = None  # the outcome that cancelling it leads to

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(asked.request.prompt_ids) for asked in self.asks)


class Worker:
    """Runs jobs on a thread of its own.

    Args:
        most: jobs that may wait; more are refused.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, metrics: Metrics, most: int):
        self._engine, self._tokenizer = engine, tokenizer
        self._metrics, self._most = metrics, most
        self._change = threading.Condition()
        self._queue: deque[Job] = deque()
        self._active: Job | None = None
        self._closed = False
        self._seconds = 1.0  # what a job takes, a moving average
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)

    def start(self) -> None:
        """Start working."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new jobs are taken."""
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    def submit(self, job: Job) -> int:
        """Put a job at the end of the queue; how many are before it.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server is ending.
        """
        with self._change:
            if self._closed:
                raise shutting_down()
            if len(self._queue) >= self._most:
                wait = min(60, max(1, round(self._seconds * len(self._queue))))
                raise ApiError(
                    429,
                    f"{self._most} requests are waiting already; try again later",
                    "rate_limit_error",
                    code="queue_full",
                    headers={"Retry-After": str(wait)},
                )
            self._queue.append(job)
            before = len(self._queue) - 1 + (self._active is not None)
            self._metrics.waiting.set(len(self._queue))
            self._change.notify()
            return before

    def before(self, job: Job) -> int:
        """Jobs that come before a waiting one; 0 once its turn has come."""
        with self._change:
            if job not in self._queue:
                return 0
            return self._queue.index(job) + (self._active is not None)

    def cancel(self, job: Job, outcome: str = "cancelled") -> None:
        """Let go of a job: at once when it waits, after the burst at hand when it runs."""
        with self._change:
            job.cancelled = job.cancelled or outcome
            if job not in self._queue:
                return
            self._queue.remove(job)
            self._metrics.waiting.set(len(self._queue))
        self._end(job, outcome)

    def close(self) -> None:
        """Take no more jobs and let go of those that wait; the one that runs goes on."""
        with self._change:
            self._closed = True
            waiting = list(self._queue)
            self._change.notify()
        for job in waiting:
            self.cancel(job, "shutdown")

    def cancel_active(self) -> None:
        """Let go of the job that runs, because the server ends."""
        if (job := self._active) is not None:
            self.cancel(job, "shutdown")

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end; whether it did."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # On the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.started = time.perf_counter()
            error = None
            try:
                outcome = self._run(job)
            except ApiError as refused:
                outcome, error = "error", refused
            except Exception:
                _log.exception("a request failed")
                outcome, error = "error", internal()
            with self._change:
                self._active = None
                self._seconds += 0.2 * (time.perf_counter() - job.started - self._seconds)
            self._metrics.active.set(0)
            self._end(job, outcome, error)

    def _next(self) -> Job | None:
        with self._change:
            while not self._queue and not self._closed:
                self._change.wait()
            if not self._queue:
                return None
            self._active = self._queue.popleft()
            self._metrics.waiting.set(len(self._queue))
            self._metrics.active.set(1)
            return self._active

    def _run(self, job: Job) -> str:
        outcome = "stop"
        for i, asked in enumerate(job.asks):
            with closing(complete(self._engine, self._tokenizer, asked)) as steps:
                for step in steps:
                    if job.cancelled:
                        return job.cancelled
                    self._note(job, step, i)
                    self._post(job, Part(i, step))
                    if any(piece.finish == "length" for piece in step.pieces):
                        outcome = "length"
        return outcome

    def _note(self, job: Job, step: Step, prompt: int) -> None:
        self._metrics.proposed.inc(step.proposed)
        self._metrics.accepted.inc(step.accepted)
        for piece in step.pieces:
            job.drawn += piece.drawn
            if piece.drawn and (prompt, piece.sample) == (0, 0):
                job.speed.note(piece.drawn)

    def _end(self, job: Job, outcome: str, error: ApiError | None = None) -> None:
        self._metrics.ended(job, outcome)
        _log.info("%s", _told(job, outcome))
        if outcome == "shutdown":
            error = shutting_down()
        self._post(job, End(outcome, error))

    def _post(self, job: Job, event: Part | End) -> None:
        try:
            job.loop.call_soon_threadsafe(job.events.put_nowait, event)
        except RuntimeError:  # the loop has closed: nobody listens any more
            pass


def _told(job: Job, outcome: str) -> str:
    """One line about a job, without its text."""
    parts = [f"{job.endpoint} {outcome}: {job.prompt_tokens} + {job.drawn} tokens"]
    if job.started is not None:
        parts.append(f"waited {job.started - job.received:.2f} s")
    if job.speed.first is not None:
        parts.append(f"first token after {job.speed.first - job.received:.2f} s")
    if job.speed.rate is not None:
        parts.append(f"{job.speed.rate:.1f} tok/s")
    return ", ".join(parts)
