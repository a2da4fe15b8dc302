"""Where metrics go: always a JSONL file, and Weights & Biases when asked."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from laneformer_jax import settings
from laneformer_jax.files import atomic_file
from train.config import RunConfig, WandbConfig

JSONL = "metrics.jsonl"
Record = dict[str, Any]  # always with `step`


class Sink(Protocol):
    """A place for records."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line. A kill costs no line that was written, a lost machine those after `sync`.

    Lines of updates after `step`, and a line that a killed process left unfinished, are dropped
    first, so that a resumed run's file is that of an undisturbed one.

    Attributes:
        records: what the file held up to `step`.
    """

    def __init__(self, path: Path, step: int):
        self.records = [r for r in read_jsonl(path) if r["step"] <= step]
        with atomic_file(path) as file:
            file.writelines(json.dumps(record) + "\n" for record in self.records)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Returns with everything on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | Path) -> list[Record]:
    """The complete records of a metrics file; none when there is no file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class WandbSink:
    """A Weights & Biases run, under the same id after every resume.

    The x axis is the metric `step` and not wandb's own counter, which would drop points of updates
    that a resumed run makes again. An offline run that resumes is a new folder, and wandb keeps only
    one of them when synced: so each starts with all points before it.
    """

    def __init__(self, config: WandbConfig, run: RunConfig, folder: Path, before: list[Record]):
        home = folder / "wandb"
        home.mkdir(parents=True, exist_ok=True)
        for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(name, str(home.resolve()))
        import wandb

        mode = "offline" if os.environ.get("WANDB_MODE") == "offline" else config.mode
        self._run = wandb.init(
            project=config.project,
            name=config.name,
            id=_run_id(home),
            dir=str(folder.resolve()),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=settings.to_dict(run),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if mode == "offline":
            for record in before:
                self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(record))

    def close(self) -> None:
        self._run.finish()


def _run_id(home: Path) -> str:
    import secrets

    file = home / "run_id"
    if not file.exists():
        with atomic_file(file) as out:
            out.write(secrets.token_hex(4))
    return file.read_text(encoding="utf-8")


class MetricsWriter:
    """All sinks of a run. wandb failing to start is a warning: the JSONL file has everything."""

    def __init__(self, config: RunConfig, folder: Path, step: int):
        self._jsonl = JsonlSink(folder / JSONL, step)
        self.sinks: list[Sink] = [self._jsonl]
        if config.log.wandb is None:
            return
        try:
            sink = WandbSink(config.log.wandb, config, folder, self._jsonl.records)
        except Exception as error:
            # Anything from a missing key to no network; wandb has no common class for them.
            told = str(error).strip().splitlines()[0] if str(error).strip() else ""
            warnings.warn(
                f"wandb could not start ({type(error).__name__}: {told}); metrics go to"
                f" {folder / JSONL} only",
                stacklevel=2,
            )
        else:
            self.sinks.append(sink)

    def has(self, step: int, name: str) -> bool:
        """Whether the file already held metric `name` of `step` when this process began."""
        return any(r["step"] == step and name in r for r in self._jsonl.records)

    def write(self, record: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(record)

    def sync(self) -> None:
        """The JSONL file is on disk when this returns."""
        self._jsonl.sync()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class Unwritten:
    """Stands for MetricsWriter in the processes that write nothing."""

    def has(self, step: int, name: str) -> bool:
        return False

    def write(self, record: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...
