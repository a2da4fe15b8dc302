"""The report: an HTML page with the scores, one page per task, and pass@k over k."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from eval.suites import Suite
from laneformer_jax.files import atomic_dir

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    folder: Path,
    title: str,
    suites: Mapping[str, Suite],
    results: Mapping[str, Any],
    samples: Mapping[str, Mapping[str, list[dict[str, Any]]]],
) -> Path:
    """Write `index.html`, `tasks/` and `pass_at_k.png` into `folder`, replacing what was there.

    Args:
        results: the content of `results.json`.
        samples: by suite and task, verdict records with `program` and `answer` (or None) added.

    Returns:
        The path of `index.html`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    pages = {
        name: [
            {
                "id": task.task_id,
                "function": task.entry_point,
                "prompt": task.prompt,
                "file": f"tasks/{name}-{task.task_id.replace('/', '-')}.html",
                "samples": samples[name].get(task.task_id, []),
                "outcomes": _outcomes(samples[name].get(task.task_id, [])),
            }
            for task in suite.tasks.values()
        ]
        for name, suite in suites.items()
    }
    with atomic_dir(folder, overwrite=True) as new:
        (new / "tasks").mkdir()
        page = environment.get_template("task.html")
        for name, tasks in pages.items():
            corrections = suites[name].corrections
            for task in tasks:
                text = page.render(
                    title=f"{task['id']} – {title}",
                    suite=name,
                    task=task,
                    correction=corrections.get(str(task["id"]), ""),
                )
                (new / str(task["file"])).write_text(text, encoding="utf-8", errors="replace")
        plot = _plot(new / "pass_at_k.png", results["suites"])
        text = environment.get_template("index.html").render(
            title=title,
            facts={**results["environment"], **results.get("settings", {})},
            suites=results["suites"],
            perplexity=results.get("perplexity"),
            pages=pages,
            plot=plot,
        )
        (new / "index.html").write_text(text, encoding="utf-8", errors="replace")
    return folder / "index.html"


def _outcomes(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of a task's samples: kind, how many, and the first one with its reason."""
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        kind = sample["kind"]
        if kind != "pass" and sample["passed"].get("base") and "plus" in sample["passed"]:
            kind += " (base passed)"
        first = {"kind": kind, "count": 0, "sample": sample["sample"], "reason": sample["reason"]}
        found.setdefault(kind, first)["count"] += 1
    return list(found.values())


def _plot(path: Path, suites: Mapping[str, Any]) -> bool:
    """Draw pass@k over k where there is more than one sample per task."""
    curves = {
        f"{name} {part}": values
        for name, result in suites.items()
        for part, values in result["pass_at_k"].items()
        if len(values) > 1
    }
    if not curves:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in curves.items():
        style = "--" if label.endswith(" plus") else "-"  # both show where they are the same
        ks, shown = range(1, len(values) + 1), [100 * v for v in values]
        axes.plot(ks, shown, style, marker=".", label=label)
    axes.set(xlabel="k", ylabel="pass@k, %", ylim=(0, 100))
    if max(map(len, curves.values())) > 20:
        axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    return True
