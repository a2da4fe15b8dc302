"""Encoded documents in order: from random access, or from a stream as it comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
from grain.experimental import WindowShuffleIterDataset

from data.config import SourceConfig
from data.documents import Encoder, skipped, texts_of
from data.sources import Split
from data.sources.hub import HubStream
from data.sources.opening import text_hash
from data.workers import Workers


class DocumentStream(grain.IterDataset):
    """The documents of one source in an order, encoded, with a state of one number.

    Workers stand before mixing and packing and give documents back in order, so what comes out,
    and the state, do not depend on their number.

    Args:
        order: indices of documents; may be endless.
        workers: encode them; who made them closes them.
        source: number of the encoder among the workers'.
    """

    def __init__(self, order: grain.MapDataset, workers: Workers, source: int):
        super().__init__()
        self.order, self.workers, self.source = order, workers, source

    def __iter__(self) -> grain.DatasetIterator:
        return _DocumentIterator(self)


class _DocumentIterator(grain.DatasetIterator):
    def __init__(self, stream: DocumentStream):
        super().__init__()
        self._stream, self._position = stream, 0
        self._inner: Iterator[dict[str, Any]] | None = None

    def __next__(self) -> dict[str, Any]:
        if self._inner is None:
            stream = self._stream
            self._inner = stream.workers.documents(stream.source, stream.order, self._position)
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
        if isinstance(self._inner, grain.DatasetIterator):
            self._inner.close()
        self._inner = None


def hub_stream(
    encoder: Encoder,
    split: Split,
    deduplicate: bool,
    seed: int | None,
    shard: int = 0,
    num_shards: int = 1,
) -> grain.IterDataset:
    """The encoded documents of a streamed Hub dataset, shuffled within windows unless `seed` is
    None. Read and encoded in this process."""
    config = encoder.config
    rows: grain.IterDataset = _Chosen(
        HubStream(encoder.name, config, shard, num_shards), config, split, deduplicate
    )
    if seed is not None and config.shuffle_window > 1:
        rows = WindowShuffleIterDataset(rows, window_size=config.shuffle_window, seed=seed)
    return rows.map(_EncodeRow(encoder))


def streamed_texts(name: str, config: SourceConfig) -> Iterator[str]:
    """The texts of one pass over a streamed dataset's training rows."""
    rows = HubStream(name, dataclasses.replace(config, epochs=1))
    for row in _Chosen(rows, config, "train", deduplicate=True):
        if not row["duplicate"]:
            yield from texts_of(row["record"], config)


class _EncodeRow(grain.transforms.Map):
    def __init__(self, encoder: Encoder):
        self._encoder = encoder

    def map(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if row["duplicate"]:
            return skipped("duplicate")
        where = f"{self._encoder.config.path}, row {row['row']} of this process's part"
        return self._encoder.encode(row["record"], lambda: where)


GENERATION = 16_384  # rows


class _Chosen(grain.IterDataset):
    """The rows of a stream that are in a split, with `duplicate` set where a text came before.

    A stream cannot be searched, so the texts of the current generation of rows and of the one
    before it are remembered: a repeat is found at a distance of up to 16,384 rows, and at most at
    twice that. Restoring reads those rows again.
    """

    def __init__(
        self, rows: grain.IterDataset, config: SourceConfig, split: Split, deduplicate: bool
    ):
        super().__init__(rows)
        self.config, self.split, self.deduplicate = config, split, deduplicate

    def __iter__(self) -> grain.DatasetIterator:
        return _ChosenIterator(iter(self._parent), self)


class _ChosenIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, chosen: _Chosen):
        super().__init__(parent)
        self._split, self._deduplicate = chosen.split, chosen.deduplicate
        self._config = chosen.config
        self._limit = int(chosen.config.heldout * 2**64)
        self._forget()

    def _forget(self) -> None:
        """Remember nothing; the parent stands where remembering begins."""
        self._epoch = -1
        self._seen: set[bytes] = set()
        self._seen_before: set[bytes] = set()
        # Where the earlier and the current generation begin, and rows read of each.
        self._starts = [self._parent.get_state()] * 2
        self._rows = [0, 0]

    def __next__(self) -> dict[str, Any]:
        while True:
            row = self._take()
            if row is not None:
                return row

    def _take(self) -> dict[str, Any] | None:
        """The next row, or None when it is not in the split."""
        if self._rows[1] == GENERATION:
            self._next_generation()
        row = next(self._parent)
        self._rows[1] += self._deduplicate
        text = text_hash(row["record"], self._config)
        if self._split != "all":
            held = int.from_bytes(text[:8], "big") < self._limit
            if held != (self._split == "heldout"):
                return None
        return {**row, "duplicate": self._deduplicate and self._repeats(row["epoch"], text)}

    def _repeats(self, epoch: int, text: bytes) -> bool:
        if epoch != self._epoch:  # each pass is judged by itself
            self._epoch, self._seen, self._seen_before = epoch, set(), set()
        repeated = text in self._seen or text in self._seen_before
        self._seen.add(text)
        return repeated

    def _next_generation(self) -> None:
        self._seen_before, self._seen = self._seen, set()
        self._starts = [self._starts[1], self._parent.get_state()]
        self._rows = [self._rows[1], 0]

    def get_state(self) -> dict[str, Any]:
        if not self._deduplicate:
            return {"start": self._parent.get_state(), "rows": [0, 0]}
        return {"start": self._starts[0], "rows": list(self._rows)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._parent.set_state(state["start"])
        self._forget()
        before, now = map(int, state["rows"])
        for _ in range(before):
            self._take()
        if before:
            self._next_generation()
        for _ in range(now):
            self._take()


class Chain(grain.IterDataset):
    """One stream after another."""

    def __init__(self, parents: Sequence[grain.IterDataset]):
        super().__init__(parents)

    def __iter__(self) -> grain.DatasetIterator:
        return _ChainIterator([iter(p) for p in self.parents])


class _ChainIterator(grain.DatasetIterator):
    def __init__(self, parents: Sequence[grain.DatasetIterator]):
        super().__init__(parents)
        self._streams, self._current = list(parents), 0

    def __next__(self) -> Any:
        while self._current < len(self._streams):
            try:
                return next(self._streams[self._current])
            except StopIteration:
                self._current += 1
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {
            "current": self._current,
            "states": [stream.get_state() for stream in self._streams],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._current = int(state["current"])
        for stream, saved in zip(self._streams, state["states"], strict=True):
            stream.set_state(saved)
