"""Where metrics go: always a JSONL file; TensorBoard and Weights & Biases when asked."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from laneformer_jax import settings
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file
from train.clock import earlier
from train.config import LogConfig, RunConfig, WandbConfig

JSONL, TENSORBOARD = "metrics.jsonl", "tensorboard"
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
        earlier: when the run began, and its useful seconds up to `step` (`clock.earlier`).
    """

    def __init__(self, path: Path, step: int):
        held = read_jsonl(path)
        self.records = [r for r in held if r["step"] <= step]
        self.earlier = earlier(held, step)
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


class TensorBoardSink:
    """Scalars for TensorBoard, in a folder that all processes of the run before and after share.

    Each process writes a file of its own. Its first event has TensorBoard hide what an earlier one
    wrote of updates after `step`. Every record is on its way to the disk when `write` returns.

    Args:
        before: records up to `step`, for a folder that holds none yet.
    """

    def __init__(self, folder: Path, step: int, before: list[Record]):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        files = len(list(folder.glob("events.*")))
        new = files == 0
        folder.mkdir(exist_ok=True)
        # Not SummaryWriter, whose thread may hold events back beyond a flush. Names count whole seconds.
        self._file = EventsWriter(str(folder / "events"), f".{files}")
        if not new:
            start = SessionLog(status=SessionLog.START)
            self._file.write_event(Event(step=step + 1, wall_time=time.time(), session_log=start))
        for record in before if new else []:
            self._add(record)
        self._file.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        self._add(record)
        self._file.flush()

    def _add(self, record: Mapping[str, Any]) -> None:
        when = record.get("time", time.time())
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                summary = self._scalar(name, value)
                event = self._event(step=record["step"], wall_time=when, summary=summary)
                self._file.write_event(event)

    def close(self) -> None:
        self._file.close()


def check_sinks(config: LogConfig) -> None:
    """Raises UserError when what the config asks for is not installed."""
    if config.tensorboard and find_spec("tensorboardX") is None:
        raise UserError(
            "log.tensorboard: needs tensorboardX; pip install 'laneformer-jax[tensorboard]'"
        )


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
    """All sinks of a run; each gets every record. wandb failing to start is a warning: the JSONL file
    has everything.

    Attributes:
        earlier: when the run began, and its useful seconds so far (`clock.earlier`).
    """

    def __init__(self, config: RunConfig, folder: Path, step: int):
        self._jsonl = JsonlSink(folder / JSONL, step)
        self.earlier = self._jsonl.earlier
        self.sinks: list[Sink] = [self._jsonl]
        if config.log.tensorboard:
            board = TensorBoardSink(folder / TENSORBOARD, step, self._jsonl.records)
            self.sinks.append(board)
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

    earlier: tuple[float | None, float] = (None, 0.0)

    def has(self, step: int, name: str) -> bool:
        return False

    def write(self, record: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...
