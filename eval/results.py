"""Scores of judged programs: per suite and part, pass@k with confidence intervals."""

from __future__ import annotations

import collections
import dataclasses
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from eval import passk
from eval.suites import Suite

KINDS = ("pass", "wrong answer", "exception", "time limit", "crash")


def score(suite: Suite, verdicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of a suite as plain data.

    A task without any program counts as failed, as often as the other tasks have programs.

    Args:
        verdicts: records with `task_id`, `passed` (by part) and `kind`.
    """
    by_task: dict[str, list[Mapping[str, Any]]] = {task_id: [] for task_id in suite.tasks}
    for verdict in verdicts:
        by_task[verdict["task_id"]].append(verdict)
    samples = max((len(found) for found in by_task.values()), default=0)
    parts = next(iter(suite.tasks.values())).parts
    kinds = collections.Counter(v["kind"] for found in by_task.values() for v in found)
    scores, curves = {}, {}
    for part in parts:
        counts = [
            (len(found) or max(samples, 1), sum(v["passed"][part] for v in found))
            for found in by_task.values()
        ]
        scores[part] = {
            f"pass@{e.k}": {"value": e.value, "low": e.low, "high": e.high}
            for e in passk.estimates(counts)
        }
        scores[part]["solved"] = {"tasks": sum(c > 0 for _, c in counts), "of": len(counts)}
        fewest = min(n for n, _ in counts)
        curves[part] = [passk.estimate(counts, k).value for k in range(1, fewest + 1)]
    return {
        "source": suite.source,
        "tasks": len(suite.tasks),
        "programs": sum(map(len, by_task.values())),
        "tasks_without_program": [t for t, found in by_task.items() if not found],
        "scores": scores,
        "kinds": {kind: kinds[kind] for kind in KINDS},
        "corrections": suite.corrections,
        "pass_at_k": curves,
    }


def environment(level: str, workers: int, min_seconds: float) -> dict[str, Any]:
    """What the verdicts depend on besides the programs."""
    import laneformer_jax

    return {
        "isolation": level,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "laneformer": laneformer_jax.__version__,
        "workers": workers,
        "min_seconds": min_seconds,
    }


def table(suites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The scores as lines of text."""
    lines = []
    for name, result in suites.items():
        for part, scores in result["scores"].items():
            for metric, value in scores.items():
                if metric == "solved":
                    continue
                solved = scores["solved"]
                lines.append(
                    f"{name:<11} {part:<5} {metric:<9} {100 * value['value']:6.2f} %"
                    f"  [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
                    f"  {solved['tasks']}/{solved['of']} tasks solved"
                )
    return lines


def plain(verdict: Any) -> dict[str, Any]:
    """A verdict as a record."""
    return dataclasses.asdict(verdict)
