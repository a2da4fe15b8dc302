"""From a `DataConfig` to batches: read, tokenise, mix, pack, batch, with exact state."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from data.config import DataConfig, SourceConfig
from data.documents import Encoder
from data.mixture import Mixture
from data.packing import Batch, batch_of, pack, padding
from data.sources import Split, open_source
from data.streams import DocumentStream
from laneformer_jax import settings
from laneformer_jax.chat import ChatTemplate
from laneformer_jax.errors import UserError, nearest
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
    opened = _open(config, tokenizer, "train", seq_len if config.packing == "best_fit" else None)
    plan = _Plan(
        config=config,
        encoders=opened,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
        num_shards=config.num_shards or process_count,
        fingerprint=_fingerprint(config, opened, tokenizer, seq_len, batch_size, seed),
    )
    plan.check()
    dataset: grain.IterDataset = _Batches(plan)
    if config.prefetch_batches:
        dataset = ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=config.prefetch_batches)
    return dataset


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
    for name in sources or ():
        if name not in config.sources:
            raise UserError(
                f"eval source {name!r}: not in the mixture{nearest(name, config.sources)}"
            )
    chosen = {
        name: source
        for name, source in config.sources.items()
        if source.heldout > 0 and (sources is None or name in sources)
    }
    if not chosen:
        raise UserError(
            "evaluation: no source holds documents out; give one a `heldout`, such as 0.02"
        )
    _check_divides("batch_size", batch_size, "processes", process_count)
    chosen_config = settings.from_dict(
        DataConfig, {**settings.to_dict(config), "sources": settings.to_dict(chosen)}
    )
    limit = seq_len if config.packing == "best_fit" else None
    encoders = _open(chosen_config, tokenizer, "heldout", limit)
    documents = grain.MapDataset.concatenate(
        [grain.MapDataset.range(len(e.source)).map(e) for e in encoders]
    )
    stream = Mixture(
        [DocumentStream(documents, num_workers=0, num_threads=config.read_threads)],
        ["evaluation"],
        [1.0],
        [len(documents)],
    )
    rows = pack(stream, seq_len, config.packing, config.packing_bins, seed=0)
    return _EvalBatches(rows, seq_len, batch_size, process_index, process_count, max_batches)


def training_texts(config: DataConfig) -> Iterator[str]:
    """Every text of the training documents, for training a tokenizer; held-out ones are left out.

    Bad documents of a source that skips them are left out too; others raise UserError.
    """
    for name, source_config in config.sources.items():
        source = open_source(name, source_config, "train")
        for index in range(len(source)):
            try:
                record = source[index]
            except UserError as error:
                if source_config.skips_errors:
                    continue
                raise UserError(f"source {name!r}: {error}") from None
            yield from _texts(record, source_config)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those that the processes of a run got at the same step.

    The result restores any process of a run with the same number of shards, or with a number of
    processes that divides it.
    """
    merged = dict(states[0])
    merged["shards"] = {k: v for state in states for k, v in state["shards"].items()}
    return merged


def counts(state: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Per source, what an iterator with this state has read: `documents`, `tokens`, `bytes`,
    `truncated`, and `skipped_<reason>` for each reason that occurred."""
    total: dict[str, dict[str, int]] = {}
    for shard in state["shards"].values():
        for name, source in _mixture_state(shard)["sources"].items():
            into = total.setdefault(name, {})
            for key, value in source["counts"].items():
                into[key] = into.get(key, 0) + value
    return total


def _mixture_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    while "sources" not in state:
        state = state.get("parent_state") or state["parent"]
    return state


def _texts(record: Mapping[str, Any], config: SourceConfig) -> Iterator[str]:
    if config.row_format == "messages":
        values = [m.get("content") for m in record.get(config.messages_field) or ()]
    elif config.row_format == "prompt_response":
        values = [record.get(config.prompt_field), record.get(config.response_field)]
    else:
        values = [record.get(config.text_field)]
    yield from (v for v in values if isinstance(v, str) and v)


def _open(
    config: DataConfig, tokenizer: Tokenizer, split: Split, max_length: int | None
) -> list[Encoder]:
    template = ChatTemplate.load(config.chat_template) if config.chat_template else ChatTemplate()
    return [
        Encoder(name, open_source(name, source, split), source, tokenizer, template, max_length)
        for name, source in config.sources.items()
    ]


def _check_divides(what: str, value: int, of: str, by: int) -> None:
    if value % by:
        raise UserError(f"{what} = {value}: must be a multiple of the number of {of}, {by}")


def _fingerprint(
    config: DataConfig,
    encoders: Sequence[Encoder],
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int,
) -> dict[str, Any]:
    """What decides which batches come, by the names a person would look for."""
    out: dict[str, Any] = {
        "tokenizer": tokenizer.sha256[:16],
        "seed": seed,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "packing": config.packing,
        "packing_bins": config.packing_bins if config.packing == "best_fit" else None,
        "chat_template": _digest(encoders[0].template.source),
    }
    for e in encoders:
        out[f"sources.{e.name}"] = _digest(settings.to_dict(e.config))
        out[f"documents of source {e.name}"] = len(e.source)
    return out


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


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
        _check_divides("num_shards", self.num_shards, "processes", self.process_count)
        _check_divides("batch_size", self.batch_size, "shards", self.num_shards)

    def shards(self) -> range:
        """The shards of this process."""
        each = self.num_shards // self.process_count
        return range(self.process_index * each, (self.process_index + 1) * each)

    def rows(self, shard: int) -> grain.IterDataset:
        """The packed rows of one shard."""
        workers = _workers(self.config.num_workers, [e.config.weight for e in self.encoders])
        streams = []
        for encoder, n in zip(self.encoders, workers, strict=True):
            order = grain.MapDataset.range(len(encoder.source))
            order = order.seed(_source_seed(self.seed, encoder.name)).shuffle()
            # Repeated, then dealt: shards stay within one document of the same epoch, and a
            # source with fewer documents than shards still reaches all of them.
            order = order.repeat(encoder.config.epochs)[shard :: self.num_shards]
            streams.append(DocumentStream(order.map(encoder), n, self.config.read_threads))
        mixture = Mixture(
            streams,
            [e.name for e in self.encoders],
            [e.config.weight for e in self.encoders],
            [len(e.source) for e in self.encoders],
        )
        config = self.config
        return pack(mixture, self.seq_len, config.packing, config.packing_bins, self.seed + shard)


def _workers(total: int, weights: Sequence[float]) -> list[int]:
    """`total` processes dealt to sources by weight; one that gets none is read in this process."""
    dealt = [0] * len(weights)
    for _ in range(total):
        most = max(range(len(weights)), key=lambda i: weights[i] / (dealt[i] + 1))
        dealt[most] += 1
    return dealt


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
        self._open(plan.num_shards)

    def _open(self, num_shards: int) -> None:
        self._plan = _replaced(self._plan, num_shards)
        self._shards = {s: iter(self._plan.rows(s)) for s in self._plan.shards()}

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
        return _stacked(rows)

    def get_state(self) -> dict[str, Any]:
        return {
            "num_shards": self._plan.num_shards,
            "fingerprint": self._plan.fingerprint,
            "shards": {str(s): it.get_state() for s, it in self._shards.items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        _check_fingerprint(state["fingerprint"], self._plan.fingerprint)
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
        # Documents from workers live in shared memory, which is freed with the last reference.
        self._shards = {}

    def close(self) -> None:
        self._close_shards()
        super().close()


def _replaced(plan: _Plan, num_shards: int) -> _Plan:
    new = dataclasses.replace(plan, num_shards=num_shards)
    new.check()
    return new


def _check_fingerprint(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [k for k in {**saved, **now} if saved.get(k) != now.get(k)]
    if changed:
        told = "; ".join(f"{k}: {saved.get(k)} then, {now.get(k)} now" for k in changed)
        raise UserError(
            f"data state: belongs to other data ({told}); restore the settings of that run, or"
            " start the data afresh from the checkpoint's parameters"
        )


def _stacked(rows: Sequence[Mapping[str, np.ndarray] | None]) -> Batch:
    """Rows to a batch; None becomes a row of padding."""
    like = next(row for row in rows if row is not None)
    empty = {k: np.zeros_like(v) for k, v in like.items()}
    filled = [empty if row is None else row for row in rows]
    return batch_of({k: np.stack([row[k] for row in filled]) for k in like})


class _EvalBatches(grain.IterDataset):
    def __init__(
        self,
        rows: grain.IterDataset,
        seq_len: int,
        batch_size: int,
        process_index: int,
        process_count: int,
        max_batches: int | None,
    ):
        super().__init__(rows)
        self.batch_size, self.max_batches = batch_size, max_batches
        mine = batch_size // process_count
        self.rows = slice(process_index * mine, (process_index + 1) * mine)
        self.seq_len = seq_len

    def __iter__(self) -> grain.DatasetIterator:
        return _EvalIterator(iter(self._parent), self)


class _EvalIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, dataset: _EvalBatches):
        super().__init__(parent)
        self._dataset, self._given = dataset, 0

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
        return _stacked(mine)

    def get_state(self) -> dict[str, Any]:
        return {"rows": self._parent.get_state(), "given": self._given}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._parent.set_state(state["rows"])
        self._given = int(state["given"])


@contextlib.contextmanager
def closing(dataset: grain.IterDataset) -> Iterator[grain.DatasetIterator]:
    """Iterate `dataset` and close its iterator, with its threads and processes, at the end."""
    iterator = iter(dataset)
    try:
        yield iterator
    finally:
        iterator.close()
