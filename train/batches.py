"""Batches for the loop: fetched one ahead, placed on the devices, each with the state behind it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Protocol

import jax
import numpy as np

from data import kill_workers
from train.processes import Processes, largest
from train.signals import StopRequest

_POLL_S = 0.1
_CLOSE_S = 5.0  # for data that does not answer


class BatchIterator(Protocol):
    """What the loop needs of a grain iterator."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...

    def close(self) -> None: ...


class Feed:
    """Gives batches in order; while one is computed on, the next is fetched in a thread.

    Several processes agree there, ahead of each batch, whether to go on: they end at the same one,
    when none has a token left, or when one was asked to stop.

    Args:
        iterator: of this process's rows.
        sharding: of the batch on the devices.
        processes: of the run.
        asked: the request that signals to this process set.
        stop: the one that all processes follow; `asked` itself where there is one process.

    Attributes:
        state: of the iterator behind the last batch given; what a checkpoint holds.
        waited: seconds that `next` was blocked.
    """

    def __init__(
        self,
        iterator: BatchIterator,
        sharding: jax.sharding.Sharding,
        processes: Processes,
        asked: StopRequest,
        stop: StopRequest,
    ):
        self._iterator, self._sharding, self._processes = iterator, sharding, processes
        self._asked, self._stop = asked, stop
        self.state = _copied(iterator.get_state())
        self.waited = 0.0
        self._mine: Future[Any] = Future()  # of this process, below what all agree on
        self._mine.set_result(None)
        self._next = _in_thread(self._fetch)

    def next(self) -> dict[str, jax.Array] | None:
        """The next batch on the devices; None when the data ends or a stop comes first."""
        began = time.perf_counter()
        try:
            while True:
                try:
                    fetched = self._next.result(_POLL_S)
                    break
                except NotYet:
                    if self._stop:
                        return None
        finally:
            self.waited += time.perf_counter() - began
        if isinstance(fetched, int):
            self._stop.signum = fetched
            return None
        if fetched is None:
            return None
        batch, self.state = fetched
        self._next = _in_thread(self._fetch)
        return place(batch, self._sharding)

    def close(self) -> None:
        """Also where the data does not answer: what waits for it is left behind, in daemon threads."""
        closed = _in_thread(self._close)
        if wait([closed], _CLOSE_S).done:
            closed.result()
        else:
            kill_workers()
            wait([closed], _CLOSE_S)

    def _close(self) -> None:
        wait([self._next, self._mine])
        self._iterator.close()

    def _fetch(self) -> tuple[dict[str, np.ndarray], Any] | int | None:
        """A batch and the state behind it; a signal to stop for; None at the end of the data."""
        if self._processes.count == 1:
            return self._fetch_mine()
        with self._processes.agreed("batches") as told:
            fetched = self._unless_asked()
            some = fetched is not None and bool((fetched[0]["segment_ids"] > 0).any())
            told.mine = [some, self._asked.signum]
        signum = largest([asked for _, asked in told.all])
        if signum is not None:
            return signum
        return fetched if any(some for some, _ in told.all) else None

    def _unless_asked(self) -> tuple[dict[str, np.ndarray], Any] | None:
        """This process's batch; None as well when a stop is asked for while the data does not come."""
        self._mine = mine = _in_thread(self._fetch_mine)
        while True:
            try:
                return mine.result(_POLL_S)
            except NotYet:
                if self._asked:
                    return None

    def _fetch_mine(self) -> tuple[dict[str, np.ndarray], Any] | None:
        batch = next(self._iterator, None)
        return None if batch is None else (batch, _copied(self._iterator.get_state()))


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    # Not of a pool, whose threads Python waits for at its end.
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True, name="batches").start()
    return future


def place(batch: dict[str, np.ndarray], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """This process's rows as its part of global arrays."""
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in batch.items()
    }


def local_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of a placed array, each once."""
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def _copied(state: Any) -> Any:
    # Iterators may go on to change what they gave.
    return copy.deepcopy(state)
