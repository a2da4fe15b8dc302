"""Worker processes that call one function, in order and without waiting for the dead.

Every worker has a pipe of its own, whose far end is open in that worker only. So a worker that
dies, at whatever moment, ends its pipe, and the reader on this side sees that. In a queue that
several processes write to, the rest of an answer that a killed worker had begun is waited for in
vain. A main process that is killed ends its workers the same way.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from laneformer_jax.errors import UserError

_PATIENCE_S = 5
_NAME = "laneformer-data"


class Processes:
    """`count` processes that call `function`, of which each gets a copy when the first call comes.

    Args:
        function: pickles; takes and gives what pickles.
        count: of processes; at least 1.
    """

    def __init__(self, function: Callable[[Any], Any], count: int):
        self._function, self.count = function, count
        self._workers: list[_Worker] = []

    def map(self, arguments: Iterable[Any], ahead: int) -> Iterator[Any]:
        """The results in order of the arguments, of which `ahead` are taken in advance.

        Raises:
            UserError: as the function raised it, or a worker has died.
            RuntimeError: what else the function raised, as text.
        """
        asked: deque[Future[Any]] = deque()
        for argument in arguments:
            asked.append(self._submit(argument))
            if len(asked) > ahead:
                yield asked.popleft().result()
        while asked:
            yield asked.popleft().result()

    def _submit(self, argument: Any) -> Future[Any]:
        if not self._workers:
            self._workers = [_Worker(self._function) for _ in range(self.count)]
            weakref.finalize(self, _stop, self._workers)
        return min(self._workers, key=_Worker.load).submit(argument)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        _stop(self._workers)
        self._workers = []


def kill_workers() -> None:
    """Kill all that work for this process, whatever they wait for; who waits for them gets a UserError."""
    for child in multiprocessing.active_children():
        if child.name == _NAME:
            child.kill()


def _stop(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.wait()


class _Worker:
    def __init__(self, function: Callable[[Any], Any]):
        # Spawned: a forked child of a process with threads can deadlock.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, function), daemon=True, name=_NAME
        )
        self.process.start()
        theirs.close()
        self._asked: deque[Future[Any]] = deque()
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # of the decision that no more answers come
        self._reader = threading.Thread(target=self._receive, daemon=True)
        self._reader.start()

    def load(self) -> int:
        return len(self._asked)

    def submit(self, argument: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._asked.append(future)
            # A pipe that has just ended is seen by the reader too, which then fails the future.
            with contextlib.suppress(OSError):
                self._pipe.send(argument)
        return future

    def wait(self) -> None:
        """Until the process, which was told to end, has ended."""
        # Only the reader waits for the process itself: of two threads that do, one is told that it
        # still runs.
        if self._reader is threading.current_thread():  # that of a collected iterator
            return
        self._reader.join(_PATIENCE_S)
        if self._reader.is_alive():  # stopped, or in a system call that does not return
            self.process.kill()
            self._reader.join(_PATIENCE_S)

    def _receive(self) -> None:
        """Read the answers, in the order they were asked for, until the pipe ends."""
        try:
            while True:
                result, error = self._pipe.recv()
                future = self._asked.popleft()
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
        except (EOFError, OSError):
            self.process.join(_PATIENCE_S)
            self._fail(_death(self.process))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = error
            self._pipe.close()
            while self._asked:
                self._asked.popleft().set_exception(error)


def _death(process: multiprocessing.process.BaseProcess) -> UserError:
    code = process.exitcode
    told = {
        -9: "it was killed, as happens when memory runs out; fewer workers take less",
        1: "its error is above; a script that starts workers needs `if __name__ == '__main__':`",
    }.get(code or 0, "its error, if it had one, is above")
    return UserError(f"data worker {process.pid} ended with exit code {code}: {told}")


def _work(pipe: Connection, function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides when to stop
    with contextlib.suppress(EOFError, OSError):  # that the main process is gone
        while True:
            argument = pipe.recv()
            pipe.send(_called(function, argument))


def _called(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | None]:
    try:
        return function(argument), None
    except UserError as error:
        return None, UserError(str(error))
    except Exception:
        # As text: not every exception survives pickling.
        return None, RuntimeError(f"in a data worker:\n{traceback.format_exc()}")
