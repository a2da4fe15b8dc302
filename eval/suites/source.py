"""Rows of a suite's data set: from the Hub by name, a folder of the same layout, or a file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.suites import humaneval, mbpp
from eval.suites.types import Suite, Task
from laneformer_jax.errors import UserError, nearest


@dataclass(frozen=True)
class _Spec:
    family: str
    hub: str
    splits: str
    files: tuple[str, ...]  # names under which a copy may lie in a folder
    columns: tuple[str, ...]
    build: Callable[[Iterable[Mapping[str, Any]]], dict[str, Task]]


_HUMANEVAL = ("task_id", "prompt", "canonical_solution", "entry_point", "test")
_SPECS = {
    "humaneval": _Spec(
        "humaneval",
        "openai/openai_humaneval",
        "test",
        ("HumanEval",),
        _HUMANEVAL,
        humaneval.base_tasks,
    ),
    "humaneval+": _Spec(
        "humaneval",
        "evalplus/humanevalplus",
        "test",
        ("HumanEvalPlus-OriginFmt",),
        _HUMANEVAL,
        humaneval.plus_tasks,
    ),
    "mbpp": _Spec(
        "mbpp",
        "google-research-datasets/mbpp",
        "test",
        ("mbpp",),
        ("task_id", "text", "code", "test_list", "test_setup_code"),
        mbpp.base_tasks,
    ),
    "mbpp+": _Spec(
        "mbpp",
        "evalplus/mbppplus",
        "test",
        ("MbppPlus-OriginFmt",),
        ("task_id", "code", "prompt", "test_list", "test"),
        mbpp.plus_tasks,
    ),
}
SUITES = tuple(_SPECS)


def load_suite(name: str, data: str | Path | None = None) -> Suite:
    """Load a suite by name.

    Args:
        name: one of `SUITES`.
        data: None for the Hub (or a relative folder of the Hub name, as `load_dataset` resolves
            it); a `.jsonl` or `.jsonl.gz` file in the Hub's schema; a folder that holds such a
            file or the Hub data set under its name.

    Raises:
        UserError: unknown name, data not found, or rows of another schema.
    """
    if name not in _SPECS:
        raise UserError(f"unknown suite {name!r}{nearest(name, SUITES)}: {', '.join(SUITES)}")
    spec = _SPECS[name]
    rows, source = _rows(spec, Path(data) if data is not None else None)
    if name == "mbpp":
        rows = [row for row in rows if int(row["task_id"]) in mbpp.TEST_IDS]
    missing = [c for c in spec.columns if not rows or c not in rows[0]]
    if missing:
        raise UserError(
            f"{source}: no column {missing[0]!r}; {name} is read in the schema of {spec.hub}:"
            f" {', '.join(spec.columns)}"
        )
    return Suite(name, spec.family, source, spec.build(rows))


def _rows(spec: _Spec, data: Path | None) -> tuple[list[dict[str, Any]], str]:
    if data is None:
        return _hub(spec, spec.hub), spec.hub
    if data.is_file():
        return _file(data), str(data)
    for stem in spec.files:
        for suffix in (".jsonl", ".jsonl.gz"):
            if (data / (stem + suffix)).is_file():
                return _file(data / (stem + suffix)), str(data / (stem + suffix))
    for folder in (data / spec.hub, data):
        if (folder.is_dir() and any(folder.rglob("*.parquet"))) or any(folder.rglob("*.jsonl*")):
            return _hub(spec, str(folder)), str(folder)
    raise UserError(f"{data}: holds neither {spec.files[0]}.jsonl(.gz) nor a copy of {spec.hub}")


def _file(path: Path) -> list[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        try:
            return [json.loads(line) for line in lines if line.strip()]
        except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: not JSON lines: {error}") from None


def _hub(spec: _Spec, where: str) -> list[dict[str, Any]]:
    import datasets

    try:
        return list(datasets.load_dataset(where, split=spec.splits))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot load {where} ({first[:200]}); give a local copy with --data, a folder or a"
            " .jsonl(.gz) file in the Hub's schema"
        ) from None
