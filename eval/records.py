"""JSON lines that survive being killed: one record per line, a torn last line is dropped.

In ASCII, since answers may hold halves of surrogate pairs, which UTF-8 cannot.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from eval.suites import Task
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a `.jsonl` or `.jsonl.gz` file.

    Raises:
        UserError: no such file, or a line that is not a JSON object.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    records = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise UserError(f"{path}:{number}: not a JSON object")
                    records.append(record)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: line {len(records) + 1} is not JSON ({error})") from None
    return records


class Journal:
    """An append-only JSON-lines file; `done` holds what earlier runs wrote, by key.

    Args:
        path: the file; made if missing. A last line without an end is cut off.
        key: names of the fields that identify a record.
    """

    def __init__(self, path: Path, key: tuple[str, ...]):
        self._key, self.path = key, path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            self._file.truncate(whole)
        self.done: dict[tuple[Any, ...], dict[str, Any]] = {}
        for line in data[:whole].splitlines():
            record = json.loads(line)
            self.done[self.key_of(record)] = record

    def key_of(self, record: dict[str, Any]) -> tuple[Any, ...]:
        """The values of the key fields."""
        return tuple(record.get(name) for name in self._key)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record; it is on disk when this returns."""
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done[self.key_of(record)] = record

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Replace the file by these records, in this order."""
        write(self.path, records)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._file.close()


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a JSON-lines file, whole or not at all."""
    with atomic_file(path) as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def programs(path: Path, tasks: dict[str, Task]) -> Iterator[tuple[str, int, str]]:
    """(task id, sample, program) of a samples file in EvalPlus's format.

    A record has `task_id` and either `solution`, a program, or `completion`, which continues the
    prompt. Records of other tasks are left out.

    Raises:
        UserError: a record without these fields.
    """
    counts: dict[str, int] = {}
    for number, record in enumerate(read(path), 1):
        task_id = record.get("task_id")
        task = tasks.get(str(task_id))
        if isinstance(record.get("solution"), str):
            program = record["solution"]
        elif isinstance(record.get("completion"), str):
            program = (task.prompt if task else "") + record["completion"]
        else:
            raise UserError(
                f"{path}: record {number} has neither `solution` nor `completion`; the format is"
                ' {"task_id": "HumanEval/0", "solution": "def …"}'
            )
        if task is not None:
            index = counts.get(task.task_id, 0)
            counts[task.task_id] = index + 1
            yield task.task_id, index, program
