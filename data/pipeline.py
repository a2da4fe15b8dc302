"""From a `DataConfig` to batches: read, tokenise, mix, pack, batch, with exact state."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from data.config import DataConfig
from data.decontaminate import Benchmarks
from data.documents import Encoder, texts_of
from data.mixture import Mixture, Weights
from data.packing import Batch, pack, padding, stacked
from data.sources import Split
from data.sources.opening import open_source
from data.state import check_fingerprint, fingerprint
from data.streams import DocumentStream, hub_stream, streamed_texts
from data.workers import Workers
from laneformer_jax.chat import ChatTemplate
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import Tokenizer


def build_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """The training batches of one process.

    Documents are dealt to `num_shards` streams; each stream mixes, packs and fills an equal part of
    the rows of every global batch, in order. So the global batch, the processes' rows one after
    another, depends on the number of shards and not on the processes that hold them.

    The iterator's `get_state()` is a small JSON-able dict; `set_state` on a fresh iterator
    continues with exactly the batches that would have come. With more than one process, save
    `merge_states` of all states, or each process its own.

    Args:
        config: sources and packing.
        tokenizer: encodes the documents.
        seq_len: tokens of a row.
        batch_size: rows of the global batch; a multiple of the number of shards.
        seed: of every shuffle; each epoch has its own permutation.
        process_index, process_count: whose rows to give.

    Returns:
        A grain dataset of `data.Batch` (see `data.packing.batch_of`) with
        `batch_size / process_count` rows. It ends only if every source has `epochs`; then, with
        several processes, every process goes on with batches of padding, so that none waits for
        another, and the run ends when no process has a token.

    Raises:
        UserError: a source cannot be opened, or the sizes do not divide.
    """
    if not config.sources:
        raise UserError("data.sources: no source is given; name at least one")
    opened = open_encoders(config, tokenizer, "train", seq_len)
    plan = _Plan(
        config=config,
        encoders=opened,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
        num_shards=config.num_shards or process_count,
        fingerprint=fingerprint(config, opened, tokenizer, seq_len, batch_size, seed),
    )
    plan.check()
    dataset: grain.IterDataset = _Batches(plan)
    if config.prefetch_batches:
        dataset = ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=config.prefetch_batches)
    return dataset


def training_texts(config: DataConfig) -> Iterator[str]:
    """Every text of the training documents, for training a tokenizer; held-out ones are left out.

    Streams are read once to their end. Bad documents of a source that skips them are left out too;
    others raise UserError.
    """
    for name, source_config in config.sources.items():
        if source_config.kind == "tokenized":
            raise UserError(f"source {name!r}: holds token ids, no text to train a tokenizer on")
        if source_config.streaming:
            yield from streamed_texts(name, source_config)
            continue
        source = open_source(name, source_config, "train", config.deduplicate, config.cache_dir)
        for index in range(len(source)):
            try:
                record = source[index]
            except UserError as error:
                if source_config.skips_errors:
                    continue
                raise UserError(f"source {name!r}: {error}") from None
            yield from texts_of(record, source_config)


def open_encoders(
    config: DataConfig, tokenizer: Tokenizer, split: Split, seq_len: int | None
) -> list[Encoder]:
    """The sources of a mixture, opened; `seq_len` None for documents of any length.

    Raises:
        UserError: a source cannot be opened, or was tokenised with another tokenizer.
    """
    template = ChatTemplate.load(config.chat_template) if config.chat_template else ChatTemplate()
    benchmarks = Benchmarks.load() if config.decontaminate else None
    longest = seq_len if config.packing == "best_fit" else None
    encoders = []
    for name, source in config.sources.items():
        opened = None
        if not source.streaming:
            opened = open_source(name, source, split, config.deduplicate, config.cache_dir)
            opened.check_tokenizer(tokenizer.sha256, name)
        encoders.append(Encoder(name, opened, source, tokenizer, template, benchmarks, longest))
    return encoders


def check_divides(what: str, value: int, of: str, by: int) -> None:
    """Raises UserError unless `by` divides `value`."""
    if value % by:
        raise UserError(f"{what} = {value}: must be a multiple of the number of {of}, {by}")


def _source_seed(seed: int, name: str) -> int:
    """A source's own seed: its order does not change when another source comes or goes."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class _Plan:
    config: DataConfig
    encoders: list[Encoder]
    seq_len: int
    batch_size: int
    seed: int
    process_index: int
    process_count: int
    num_shards: int
    fingerprint: dict[str, Any]

    def check(self) -> None:
        check_divides("num_shards", self.num_shards, "processes", self.process_count)
        check_divides("batch_size", self.batch_size, "shards", self.num_shards)

    def shards(self) -> range:
        """The shards of this process."""
        each = self.num_shards // self.process_count
        return range(self.process_index * each, (self.process_index + 1) * each)

    def workers(self) -> Workers:
        """What encodes for all sources and shards here."""
        readers = len(self.encoders) * len(self.shards())
        return Workers(self.encoders, self.config.num_workers, self.config.read_threads, readers)

    def rows(self, shard: int, workers: Workers) -> grain.IterDataset:
        """The packed rows of one shard."""
        config = self.config
        names = [e.name for e in self.encoders]
        streams = [self._documents(i, shard, workers) for i in range(len(self.encoders))]
        weights = Weights.of(config, self.num_shards)
        mixture = Mixture(streams, names, weights, [e.size for e in self.encoders])
        return pack(mixture, self.seq_len, config.packing, config.packing_bins, self.seed + shard)

    def _documents(self, number: int, shard: int, workers: Workers) -> grain.IterDataset:
        encoder = self.encoders[number]
        seed = _source_seed(self.seed, encoder.name)
        if encoder.size is None:
            deduplicate = self.config.deduplicate
            return hub_stream(encoder, "train", deduplicate, seed, shard, self.num_shards)
        order = grain.MapDataset.range(encoder.size).seed(seed).shuffle()
        # Repeated, then dealt: shards stay within one document of the same epoch, and a source
        # with fewer documents than shards still reaches all of them.
        order = order.repeat(encoder.config.epochs)[shard :: self.num_shards]
        return DocumentStream(order, workers, number)


class _Batches(grain.IterDataset):
    def __init__(self, plan: _Plan):
        super().__init__()
        self._plan = plan

    def __iter__(self) -> grain.DatasetIterator:
        return _BatchIterator(self._plan)


class _BatchIterator(grain.DatasetIterator):
    def __init__(self, plan: _Plan):
        super().__init__()
        self._plan = plan
        self._shards: dict[int, grain.DatasetIterator] = {}  # closing needs both if opening fails
        self._workers = plan.workers()
        self._open(plan.num_shards)

    def _open(self, num_shards: int) -> None:
        self._plan = _replaced(self._plan, num_shards)
        self._workers = self._plan.workers()
        self._shards = {s: iter(self._plan.rows(s, self._workers)) for s in self._plan.shards()}

    def __next__(self) -> Batch:
        plan = self._plan
        per_shard = plan.batch_size // plan.num_shards
        rows: list[Mapping[str, np.ndarray] | None] = []
        for shard in self._shards.values():
            rows += [next(shard, None) for _ in range(per_shard)]
        if all(row is None for row in rows):
            if plan.process_count == 1:
                raise StopIteration
            return padding(len(rows), plan.seq_len)
        return stacked(rows)

    def get_state(self) -> dict[str, Any]:
        return {
            "num_shards": self._plan.num_shards,
            "fingerprint": self._plan.fingerprint,
            "shards": {str(s): it.get_state() for s, it in self._shards.items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        check_fingerprint(state["fingerprint"], self._plan.fingerprint)
        saved = int(state["num_shards"])
        if saved != self._plan.num_shards:
            if self._plan.config.num_shards is not None or saved % self._plan.process_count:
                raise UserError(
                    f"data state: has {saved} shards, which {self._plan.process_count} processes"
                    f" with num_shards = {self._plan.num_shards} cannot continue; run with a number"
                    f" of processes that divides {saved}"
                )
            self._close_shards()
            self._open(saved)
        missing = [s for s in self._shards if str(s) not in state["shards"]]
        if missing:
            raise UserError(
                f"data state: lacks the shards {missing} of process {self._plan.process_index};"
                " restore from the states of all processes, merged"
            )
        for s, iterator in self._shards.items():
            iterator.set_state(state["shards"][str(s)])

    def _close_shards(self) -> None:
        for iterator in self._shards.values():
            iterator.close()
        self._workers.close()

    def close(self) -> None:
        self._close_shards()
        super().close()


def _replaced(plan: _Plan, num_shards: int) -> _Plan:
    new = dataclasses.replace(plan, num_shards=num_shards)
    new.check()
    return new


@contextlib.contextmanager
def closing(dataset: grain.IterDataset) -> Iterator[grain.DatasetIterator]:
    """Iterate `dataset` and close its iterator, with its threads and processes, at the end."""
    iterator = iter(dataset)
    try:
        yield iterator
    finally:
        iterator.close()
