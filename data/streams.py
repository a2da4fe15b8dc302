"""Encoded documents in order, read by threads or worker processes, with a state of one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grain
from absl import flags

# Documents that wait per worker process, and per source in this process.
_WORKER_BUFFER, _READ_BUFFER = 32, 64


class DocumentStream(grain.IterDataset):
    """The elements of `documents` in order.

    Worker processes stand before mixing and packing and deal the documents among themselves, so
    what comes out, and the state, do not depend on their number.

    Args:
        documents: random access to encoded documents; may be endless.
        num_workers: processes that read and encode; 0 for this one.
        num_threads: threads that do so in each process.
    """

    def __init__(self, documents: grain.MapDataset, num_workers: int, num_threads: int):
        super().__init__()
        self.documents, self.num_workers, self.num_threads = documents, num_workers, num_threads

    def __iter__(self) -> grain.DatasetIterator:
        return _DocumentIterator(self)

    def from_position(self, position: int) -> grain.DatasetIterator:
        """A plain grain iterator over the documents from `position` on."""
        documents = self.documents[position:] if position else self.documents
        options = grain.ReadOptions(num_threads=self.num_threads, prefetch_buffer_size=_READ_BUFFER)
        stream = documents.to_iter_dataset(options)
        if self.num_workers:
            _parse_absl_flags()
            stream = stream.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self.num_workers, per_worker_buffer_size=_WORKER_BUFFER
                )
            )
        return iter(stream)


class _DocumentIterator(grain.DatasetIterator):
    def __init__(self, stream: DocumentStream):
        super().__init__()
        self._stream, self._position = stream, 0
        self._inner: grain.DatasetIterator | None = None

    def __next__(self) -> Any:
        if self._inner is None:
            self._inner = self._stream.from_position(self._position)
        document = next(self._inner)
        self._position += 1
        return document

    def get_state(self) -> dict[str, int]:
        return {"next": self._position}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._stop()
        self._position = int(state["next"])

    def close(self) -> None:
        self._stop()
        super().close()

    def _stop(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def _parse_absl_flags() -> None:
    """grain reads an absl flag when it starts workers, also in programs that do not use absl."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
