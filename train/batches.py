"""Batches for the loop: fetched one ahead, placed on the devices, each with the state behind it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Protocol

import jax
import numpy as np

_POLL_S = 0.1


class BatchIterator(Protocol):
    """What the loop needs of a grain iterator."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...

    def close(self) -> None: ...


class Feed:
    """Gives batches in order; while one is computed on, the next is fetched in a thread.

    Attributes:
        state: of the iterator behind the last batch given; what a checkpoint holds.
        waited: seconds that `next` was blocked.
    """

    def __init__(self, iterator: BatchIterator, sharding: jax.sharding.Sharding):
        self._iterator, self._sharding = iterator, sharding
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.state = _copied(iterator.get_state())
        self.waited = 0.0
        self._next: Future[Any] = self._pool.submit(self._fetch)

    def next(self, stop: Callable[[], bool]) -> dict[str, jax.Array] | None:
        """The next batch on the devices; None when the data ends or `stop()` turns true first."""
        began = time.perf_counter()
        try:
            while True:
                try:
                    fetched = self._next.result(_POLL_S)
                    break
                except NotYet:
                    if stop():
                        return None
        finally:
            self.waited += time.perf_counter() - began
        if fetched is None:
            return None
        batch, self.state = fetched
        self._next = self._pool.submit(self._fetch)
        return place(batch, self._sharding)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._iterator.close()

    def _fetch(self) -> tuple[dict[str, np.ndarray], Any] | None:
        batch = next(self._iterator, None)
        return None if batch is None else (batch, _copied(self._iterator.get_state()))


def place(batch: dict[str, np.ndarray], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """This process's rows as its part of global arrays."""
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in batch.items()
    }


def _copied(state: Any) -> Any:
    # Iterators may go on to change what they gave.
    return copy.deepcopy(state)
