"""Encoding documents in other processes, or in this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain

from data.documents import Encoder
from data.processes import Processes
from laneformer_jax.errors import UserError

# Documents of one message: enough that sending it costs little beside encoding them.
_CHUNK = 16
_READ_BUFFER = 64  # documents that wait per source, where this process reads


class Workers:
    """What encodes for all sources and shards of one iterator.

    Processes start with the first documents asked for. Each has a copy of the encoders and nothing
    else is shared, so their number and speed change nothing about what comes out.

    Args:
        encoders: one per source.
        count: processes; 0 for this one.
        threads: that encode in this process.
        readers: how many streams of documents take turns in asking.
    """

    def __init__(self, encoders: Sequence[Encoder], count: int, threads: int, readers: int = 1):
        self.encoders = list(encoders)
        self._threads = threads
        self._processes = Processes(_Chunks(self.encoders), count) if count else None
        # Two chunks for every worker, whoever reads.
        self._ahead = -(-2 * count // readers)

    def documents(
        self, source: int, order: grain.MapDataset, position: int
    ) -> Iterator[dict[str, Any]]:
        """The documents of encoder number `source` in an order of indices, from a position on.

        Raises:
            UserError: as the encoder does, or when a worker has died.
        """
        if self._processes is None:
            documents = order.map(self.encoders[source])
            if position:  # a slice costs on every access
                documents = documents[position:]
            options = grain.ReadOptions(self._threads, _READ_BUFFER)
            return iter(documents.to_iter_dataset(options))
        chunks = (
            (source, [order[i] for i in range(start, min(start + _CHUNK, len(order)))])
            for start in range(position, len(order), _CHUNK)
        )
        return _joined(self._processes.map(chunks, self._ahead))

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()


@dataclass(frozen=True)
class _Chunk:
    documents: list[dict[str, Any]]
    error: str  # of the document after these


@dataclass(frozen=True)
class _Chunks:
    encoders: Sequence[Encoder]

    def __call__(self, chunk: tuple[int, list[int]]) -> _Chunk:
        source, indices = chunk
        documents: list[dict[str, Any]] = []
        try:
            for index in indices:
                documents.append(self.encoders[source](index))
        except UserError as error:
            return _Chunk(documents, str(error))
        return _Chunk(documents, "")


def _joined(chunks: Iterator[_Chunk]) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        yield from chunk.documents
        if chunk.error:
            raise UserError(chunk.error)
