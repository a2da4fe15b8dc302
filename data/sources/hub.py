"""Hugging Face datasets: by their Hub name, or Parquet files, by row or as a stream."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from data.config import SourceConfig
from data.sources import Record
from data.sources.names import hash_rows
from laneformer_jax.errors import UserError, nearest


class HubRows:
    """Rows of a dataset that lies on disk, memory-mapped.

    Raises:
        UserError: from `load`: no such dataset, configuration or split, no network, or a dataset
            that would need its own code to be run, which is never done.
    """

    def __init__(self, rows: Any, name: str, revision: dict[str, Any]):
        self._rows, self._name, self._revision = rows, name, revision

    @classmethod
    def load(cls, source: str, config: SourceConfig) -> HubRows:
        """Load what `config` names with `datasets.load_dataset`."""
        rows = _load(source, config, streaming=False)
        name = ",".join(config.paths)
        return cls(rows, name, {"path": name, "split": config.split, "rows": rows._fingerprint})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        record: Record = self._rows[index]
        return record

    def where(self, index: int) -> str:
        return f"{self._name}, row {index}"

    def name_hashes(self) -> np.ndarray:
        return hash_rows(self._name, np.arange(len(self)))

    def revision(self) -> dict[str, Any]:
        return self._revision


class HubStream(grain.IterDataset):
    """Rows of a streamed dataset, pass after pass, with exact state.

    Every iterator loads its own dataset object, because `datasets` keeps the place in it.

    Args:
        source: its name in the mixture, for errors.
        config: what to stream.
        shard, num_shards: which part; files are dealt where their number allows, else rows are.
    """

    def __init__(self, source: str, config: SourceConfig, shard: int = 0, num_shards: int = 1):
        super().__init__()
        self.source, self.config = source, config
        self.shard, self.num_shards = shard, num_shards

    def __iter__(self) -> grain.DatasetIterator:
        return _HubStreamIterator(self)


class _HubStreamIterator(grain.DatasetIterator):
    def __init__(self, stream: HubStream):
        super().__init__()
        self._stream, self._epoch, self._row = stream, 0, 0
        self._rows = self._load()
        self._iterator: Any = None
        # Between loading a state and the next row, `datasets` does not tell the state.
        self._loaded: str | None = None

    def _load(self) -> Any:
        from datasets.distributed import split_dataset_by_node

        stream = self._stream
        rows = _load(stream.source, stream.config, streaming=True)
        if stream.num_shards > 1:
            rows = split_dataset_by_node(rows, rank=stream.shard, world_size=stream.num_shards)
        return rows

    def __next__(self) -> dict[str, Any]:
        while self._stream.config.epochs is None or self._epoch < self._stream.config.epochs:
            if self._iterator is None:
                self._iterator = iter(self._rows)
            try:
                record = next(self._iterator)
            except StopIteration:
                if self._row == 0:
                    raise UserError(
                        f"source {self._stream.source!r}: the stream is empty"
                    ) from None
                # A fresh object: a used-up one keeps its place.
                self._rows, self._iterator, self._loaded = self._load(), None, None
                self._epoch, self._row = self._epoch + 1, 0
                continue
            self._row, self._loaded = self._row + 1, None
            return {"record": record, "epoch": self._epoch, "row": self._row - 1}
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        place = self._loaded
        if place is None and self._iterator is not None:
            place = json.dumps(self._rows.state_dict())
        return {"epoch": self._epoch, "row": self._row, "place": place}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._row = int(state["epoch"]), int(state["row"])
        self._rows, self._iterator, self._loaded = self._load(), None, state["place"]
        if self._loaded is not None:
            self._rows.load_state_dict(json.loads(self._loaded))


def _load(source: str, config: SourceConfig, streaming: bool) -> Any:
    import datasets

    if config.kind == "parquet":
        from data.sources.files import expand

        files = [
            os.path.join(root, n)
            for path in config.paths
            for root, names in expand(source, path, config.pattern)
            for n in names
        ]
        arguments: dict[str, Any] = {"path": "parquet", "data_files": files, "split": "train"}
    else:
        arguments = {
            "path": config.path,
            "name": config.config_name,
            "split": config.split,
            "revision": config.revision,
            "streaming": streaming,
        }
    called = f"source {source!r}: {', '.join(config.paths)}"
    showed_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(**arguments)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{called}: {_reason(error, config)}") from None
    except Exception as error:
        # datasets wraps what its readers find (pyarrow, JSON, UTF-8) in its own errors.
        cause = error.__cause__ or error
        raise UserError(f"{called}: cannot be read: {' '.join(str(cause).split())}") from None
    finally:
        if showed_bars:
            datasets.enable_progress_bars()
    columns = rows.column_names
    missing = [c for c in config.text_columns if columns is not None and c not in columns]
    if missing:
        hint = nearest(missing[0], columns)
        raise UserError(
            f"{called}: has no column {missing[0]!r}{hint}; it has {', '.join(map(repr, columns))}"
        )
    return rows


def _reason(error: Exception, config: SourceConfig) -> str:
    text = " ".join(str(error).split())
    if "Dataset scripts are no longer supported" in text or "trust_remote_code" in text:
        return "needs its own code to be run, which is never done; convert it to Parquet first"
    if "Unknown split" in text or "Bad split" in text:
        return f"split = {config.split!r}: {text}"
    if "BuilderConfig" in text:
        return f"config_name = {config.config_name!r}: {text}"
    if isinstance(error, ConnectionError):
        return f"not on this machine, and the Hub was not reached ({text})"
    return text
