"""Held-out documents, once and in a fixed order, for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from data.config import DataConfig
from data.documents import Encoder
from data.mixture import Mixture, Weights
from data.packing import Batch, pack, padding, stacked
from data.sources import Split
from data.streams import Chain, DocumentStream, hub_stream
from data.workers import Workers
from laneformer_jax import settings
from laneformer_jax.errors import UserError, nearest
from laneformer_jax.tokenizer import Tokenizer


def build_eval_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    sources: Sequence[str] | None = None,
    max_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """The held-out documents, once, in a fixed order; the last batch is filled with padding.

    Each source's documents come shuffled, the same way every time, so that the first `max_batches` are a
    fair sample of many files.

    Every process gets the same number of batches, whatever the number of documents: each reads all
    of them and keeps its rows, so the global batches do not depend on the number of processes.

    Args:
        config: its sources with `heldout` above 0 are read.
        tokenizer, seq_len, batch_size, process_index, process_count: as in `build_dataset`.
        sources: names of the sources to read; None for all that hold documents out.
        max_batches: stop after so many.

    Raises:
        UserError: no source holds documents out, or a name is unknown.
    """
    from data.pipeline import check_divides, open_encoders

    for name in sources or ():
        if name not in config.sources:
            hint = nearest(name, config.sources)
            names = ", ".join(config.sources)
            raise UserError(
                f"eval.sources: {name!r} is not in the mixture{hint}; its sources: {names}"
            )
    chosen = {
        name: source
        for name, source in config.sources.items()
        if source.heldout > 0 and (sources is None or name in sources)
    }
    if not chosen:
        holding = [name for name, source in config.sources.items() if source.heldout > 0]
        if holding:
            raise UserError(
                f"eval.sources = {sources}: none of them holds documents out; {', '.join(holding)}"
                " of the mixture does"
            )
        raise UserError(
            "evaluation: no source holds documents out; give one a `heldout`, such as 0.02"
        )
    check_divides("batch_size", batch_size, "processes", process_count)
    plain = {**settings.to_dict(config), "schedule": [], "sources": settings.to_dict(chosen)}
    encoders = open_encoders(settings.from_dict(DataConfig, plain), tokenizer, "heldout", seq_len)
    mine = batch_size // process_count
    rows = slice(process_index * mine, (process_index + 1) * mine)
    return _EvalBatches(encoders, config, seq_len, batch_size, rows, max_batches)


def once(
    split: Split,
    config: DataConfig,
    workers: Workers,
    number: int,
    shuffled: bool = False,
) -> grain.IterDataset:
    """Every document of a source, encoded, once: in order, or in one fixed shuffled order."""
    encoder = workers.encoders[number]
    if encoder.source is None:
        encoder = dataclasses.replace(encoder, config=dataclasses.replace(encoder.config, epochs=1))
        return hub_stream(encoder, split, config.deduplicate, seed=None)
    order = grain.MapDataset.range(len(encoder.source))
    order = order.seed(0).shuffle() if shuffled else order
    return DocumentStream(order, workers, number)


class _EvalBatches(grain.IterDataset):
    def __init__(
        self,
        encoders: Sequence[Encoder],
        config: DataConfig,
        seq_len: int,
        batch_size: int,
        rows: slice,
        max_batches: int | None,
    ):
        super().__init__()
        self.encoders, self.config, self.seq_len = encoders, config, seq_len
        self.batch_size, self.rows, self.max_batches = batch_size, rows, max_batches

    def packed(self, workers: Workers) -> grain.IterDataset:
        """All rows, one source after another."""
        config, encoders = self.config, self.encoders
        stream = Mixture(
            [Chain([once("heldout", config, workers, i, True) for i in range(len(encoders))])],
            ["evaluation"],
            Weights.constant([1.0]),
            [None if None in [e.size for e in encoders] else sum(e.size or 0 for e in encoders)],
        )
        return pack(stream, self.seq_len, config.packing, config.packing_bins, seed=0)

    def __iter__(self) -> grain.DatasetIterator:
        workers = Workers(self.encoders, self.config.num_workers, self.config.read_threads)
        return _EvalIterator(iter(self.packed(workers)), self, workers)


class _EvalIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, dataset: _EvalBatches, workers: Workers):
        super().__init__(parent)
        self._dataset, self._workers, self._given = dataset, workers, 0

    def __next__(self) -> Batch:
        if self._given == self._dataset.max_batches:
            raise StopIteration
        rows = [next(self._parent, None) for _ in range(self._dataset.batch_size)]
        if rows[0] is None:
            raise StopIteration
        self._given += 1
        mine = rows[self._dataset.rows]
        if all(row is None for row in mine):
            return padding(len(mine), self._dataset.seq_len)
        return stacked(mine)

    def get_state(self) -> dict[str, Any]:
        return {"rows": self._parent.get_state(), "given": self._given}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._parent.set_state(state["rows"])
        self._given = int(state["given"])

    def close(self) -> None:
        super().close()
        self._workers.close()
