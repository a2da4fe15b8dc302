"""Judge programs: run them in the sandbox, compare their results outside of it."""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from eval.sandbox.inside.channel import CALL, DIGEST, ERROR, VALUE
from eval.sandbox.inside.judge import short, short_args
from eval.sandbox.process import Process, SandboxError, TimeLimitError
from eval.sandbox.sandbox import Sandbox
from eval.suites import Script, Table, Task
from laneformer_jax.errors import UserError

MIN_SECONDS = 60.0
SLOWDOWN = 10.0  # a program may take this many times what the canonical solution takes here, now
_JUDGE_SECONDS = 60.0
_CANONICAL_SECONDS = 3600.0
_SEND_SECONDS = 600.0


@dataclass(frozen=True)
class Verdict:
    """What became of one program.

    Args:
        passed: for each part of the task (`base`, `plus`), whether it passed.
        kind: `pass`, `wrong answer`, `exception`, `time limit` or `crash`.
        reason: one line; empty when everything passed.
        failed_call: the first failing call, shortened.
        expected, got: what it should have returned and what it did, shortened.
        seconds: wall time, starting the interpreter included.
    """

    task_id: str
    passed: dict[str, bool]
    kind: str
    reason: str = ""
    failed_call: str = ""
    expected: str = ""
    got: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Result:
    """One value or error from a process.

    Args:
        data: its encoding, or None when it is longer than `inside.serve.KEPT` and stayed inside.
        digest: SHA-256 of the encoding where `data` is None.
    """

    ok: bool
    size: int
    data: bytes | None
    digest: bytes = b""

    @property
    def identity(self) -> tuple[int, bytes]:
        """Size and digest; equal ones mean equal encodings."""
        return self.size, self.digest or hashlib.sha256(self.data or b"").digest()


class _Failure(Exception):
    def __init__(self, kind: str, reason: str, index: int | None = None, got: str = ""):
        super().__init__(reason)
        self.kind, self.reason, self.index, self.got = kind, reason, index, got


class Grader:
    """Judges programs in parallel.

    Args:
        sandbox: from `eval.sandbox.probe.open_sandbox`.
        min_seconds: wall time every program gets, at least.
    """

    def __init__(self, sandbox: Sandbox, min_seconds: float = MIN_SECONDS):
        self.sandbox = sandbox
        self._min_seconds = min_seconds
        self._local = threading.local()
        self._judges: list[Process] = []
        self._live: set[Process] = set()
        self._lock = threading.Lock()
        self._task_locks: dict[str, threading.Lock] = {}
        self._canonical: dict[str, float] = {}
        self._references: dict[str, list[tuple[int, bytes]]] = {}

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        for judge in self._judges:
            judge.close()

    def grade_many(
        self, programs: Iterable[tuple[Any, Task, str]], workers: int
    ) -> Iterator[tuple[Any, Verdict]]:
        """Judge (key, task, program) triples; yields (key, verdict) as they are done.

        Long tasks come first, so that no worker is left alone with one at the end.
        """
        programs = sorted(programs, key=lambda program: -program[1].seconds)
        with ThreadPoolExecutor(workers) as pool:
            running: dict[Future[Verdict], Any] = {}
            try:
                for key, task, program in programs:
                    running[pool.submit(self.grade, task, program)] = key
                    if len(running) >= 2 * workers:
                        yield from self._finished(running)
                while running:
                    yield from self._finished(running)
            except BaseException:  # Ctrl-C waits for no program
                for future in running:
                    future.cancel()
                with self._lock:
                    for process in (*self._live, *self._judges):
                        process.kill()
                raise

    def _finished(self, running: dict[Future[Verdict], Any]) -> list[tuple[Any, Verdict]]:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        return [(running.pop(future), future.result()) for future in done]

    def grade(self, task: Task, program: str) -> Verdict:
        """Judge one program."""
        tests, failure = task.tests, None
        # Before the clock starts: the data set's own computation is not the program's time.
        sums = self._reference(task, tests) if isinstance(tests, Table) else None
        began = time.monotonic()
        clock = _Clock(self._min_seconds, lambda: self._canonical_seconds(task))
        try:
            with self._running(_whole(program, tests), clock) as process:
                if isinstance(tests, Script):
                    self._script(process, tests, clock)
                else:
                    self._table(process, tests, sums, clock)
        except _Failure as error:
            failure = error
        return _verdict(task, failure, time.monotonic() - began)

    @contextlib.contextmanager
    def _running(self, program: str, clock: _Clock) -> Iterator[Process]:
        """A process that has loaded `program`; what ends it early becomes a `_Failure`."""
        process = self.sandbox.program(program)
        with self._lock:
            self._live.add(process)
        try:
            loaded = _result(process, clock)
            if not loaded.ok:
                raise _Failure("exception", _text(loaded))
            yield process
        except TimeLimitError:
            raise _Failure("time limit", f"still running after {clock.limit:.0f} s") from None
        except SandboxError as error:
            raise _Failure("crash", str(error)) from None
        finally:
            with self._lock:
                self._live.discard(process)
            process.close()

    def _table(
        self,
        process: Process,
        table: Table,
        sums: list[tuple[int, bytes]] | None,
        clock: _Clock,
    ) -> None:
        _ask(process, ("map", table.function, table.inputs))
        for index, arguments in enumerate(table.inputs):
            expected = table.expected[index] if table.expected is not None else None
            try:
                result = _result(process, clock)
            except TimeLimitError:
                reason = f"still running after {clock.limit:.0f} s"
                raise _Failure("time limit", reason, index) from None
            except SandboxError as error:
                raise _Failure("crash", str(error), index) from None
            if not result.ok:
                raise _Failure("exception", _text(result), index)
            if sums is not None:
                if result.identity == sums[index]:
                    continue
                expected = self._run_reference(table, [arguments])[0].data
            elif result.data == expected:
                continue
            got = self._compare(table, arguments, result, expected)
            if got is not None:
                raise _Failure("wrong answer", "wrong result", index, got)

    def _script(self, process: Process, script: Script, clock: _Clock) -> None:
        judge = self._judge()
        try:
            _ask(judge, ("script", script.helpers, script.test, script.function))
            while True:
                frame = judge.receive(max(time.monotonic(), clock.deadline) + _JUDGE_SECONDS)
                if frame.tag != CALL:
                    break
                _ask(process, frame.payload)
                result = _result(process, clock)
                if result.data is None:
                    raise _Failure("wrong answer", f"a result of {result.size >> 20} MiB")
                answer = result.data if result.ok else _text(result)
                _ask(judge, (result.ok, answer))
        except BaseException:
            self._discard(judge)
            raise
        if frame.payload[:1] != b"+":
            text = frame.payload[1:].decode("utf-8", "replace")
            raise _Failure("exception" if " raised " in text else "wrong answer", text)

    def _compare(
        self, table: Table, arguments: list[Any], result: _Result, expected: bytes | None
    ) -> str | None:
        """None when the result is right, else the result, shortened."""
        if result.data is None or expected is None:
            return f"a value of {result.size} bytes"
        judge = self._judge()
        deadline = time.monotonic() + _JUDGE_SECONDS
        try:
            encoded = marshal.dumps(arguments, 2)
            judge.send(("compare", table.rule, encoded, result.data, expected), deadline)
            frame = judge.receive(deadline)
        except SandboxError as error:
            self._discard(judge)
            return f"a value that defeats comparison ({error})"
        text = frame.payload[1:].decode("utf-8", "replace")
        return None if frame.payload[:1] == b"+" else text

    def _judge(self) -> Process:
        """This thread's judge."""
        judge: Process | None = getattr(self._local, "judge", None)
        if judge is None:
            judge = self._local.judge = self.sandbox.judge()
            with self._lock:
                self._judges.append(judge)
        return judge

    def _discard(self, judge: Process) -> None:
        judge.close()
        self._local.judge = None
        with self._lock:
            self._judges.remove(judge)

    def _task_lock(self, task: Task) -> threading.Lock:
        with self._lock:
            return self._task_locks.setdefault(task.task_id, threading.Lock())

    def _canonical_seconds(self, task: Task) -> float:
        """How long the canonical solution takes on this machine at this moment; measured once."""
        with self._task_lock(task):
            if task.task_id not in self._canonical:
                tests, clock = task.tests, _Clock(_CANONICAL_SECONDS, lambda: 0.0)
                began = time.monotonic()
                with contextlib.suppress(_Failure):
                    source = _whole(task.canonical, tests)
                    with self._running(source, clock) as process:
                        if isinstance(tests, Script):
                            self._script(process, tests, clock)
                        else:
                            _ask(process, ("map", tests.function, tests.inputs))
                            for _ in tests.inputs:
                                _result(process, clock)
                self._canonical[task.task_id] = time.monotonic() - began
            return self._canonical[task.task_id]

    def _reference(self, task: Task, table: Table) -> list[tuple[int, bytes]] | None:
        """Size and digest of each expected result, from the reference in a sandbox of its own."""
        if table.reference is None:
            return None
        key = f"{task.task_id}:{hashlib.sha256(table.reference.source.encode()).hexdigest()}"
        with self._task_lock(task):
            if key not in self._references:
                try:
                    results = self._run_reference(table, table.inputs)
                except _Failure as error:
                    raise UserError(
                        f"{task.task_id}: the data set's own reference function fails here"
                        f" ({error.kind}: {error.reason})"
                    ) from None
                self._references[key] = [r.identity for r in results]
            return self._references[key]

    def _run_reference(self, table: Table, inputs: list[list[Any]]) -> list[_Result]:
        assert table.reference is not None
        clock = _Clock(_CANONICAL_SECONDS, lambda: 0.0)
        with self._running(table.reference.source, clock) as process:
            _ask(process, ("map", table.reference.function, inputs))
            results = [_result(process, clock) for _ in inputs]
        for result in results:
            if not result.ok:
                raise _Failure("exception", _text(result))
        return results


class _Clock:
    """A deadline that moves once, when it is reached, to what the canonical solution's time asks."""

    def __init__(self, seconds: float, canonical: Callable[[], float]):
        self._began, self.limit, self._canonical = time.monotonic(), seconds, canonical
        self._moved = False

    @property
    def deadline(self) -> float:
        return self._began + self.limit

    def extend(self) -> bool:
        """Measure the canonical solution, once; whether there is time left after that."""
        if not self._moved:
            self._moved = True
            self.limit = max(self.limit, SLOWDOWN * self._canonical())
        return time.monotonic() < self.deadline


def _ask(process: Process, request: Any) -> None:
    """Send a request; the other side is waiting for it, so this takes no time of the program's."""
    process.send(request, time.monotonic() + _SEND_SECONDS)


def _result(process: Process, clock: _Clock) -> _Result:
    """Read one value or error."""
    while True:
        try:
            frame = process.receive(clock.deadline)
            break
        except TimeLimitError:
            if not clock.extend():
                raise
    if frame.tag == DIGEST and len(frame.payload) == 8 + 32:
        size = int.from_bytes(frame.payload[:8], "little")
        return _Result(True, size, None, frame.payload[8:])
    if frame.tag not in (VALUE, ERROR):
        raise SandboxError("wrote to the private pipe")
    return _Result(frame.tag == VALUE, len(frame.payload), frame.payload)


def _whole(program: str, tests: Table | Script) -> str:
    setup = tests.program if isinstance(tests, Script) else ""
    return f"{program}\n{setup}" if setup else program


def _text(result: _Result) -> str:
    return (result.data or b"").decode("utf-8", "replace")


def _verdict(task: Task, failure: _Failure | None, seconds: float) -> Verdict:
    seconds = round(seconds, 3)
    if failure is None:
        return Verdict(task.task_id, dict.fromkeys(task.parts, True), "pass", seconds=seconds)
    passed, call, expected = dict.fromkeys(task.parts, False), "", ""
    table = task.tests
    if isinstance(table, Table) and failure.index is not None:
        call = f"{table.function}{short_args(table.inputs[failure.index])}"
        if table.expected is not None:
            expected = short(marshal.loads(table.expected[failure.index]))
        # The base inputs come first, and the first failure ends the run.
        passed["base"] = table.base is not None and failure.index >= table.base
    return Verdict(
        task.task_id, passed, failure.kind, failure.reason, call, expected, failure.got, seconds
    )
