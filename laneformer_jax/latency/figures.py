"""The figures of docs/latency.md, drawn from `studies`; SVG with text as text, equal on every run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from laneformer_jax.files import atomic_file
from laneformer_jax.latency import studies
from laneformer_jax.latency.schedule import KINDS

DATA = "data.json"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "laneformer",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_COLOURS = ["#3b6ea8", "#d1732f", "#5a9a58", "#a8434b", "#7b679e", "#8a6d4c", "#c99ab8", "#8c8c8c"]


def write(folder: Path) -> list[Path]:
    """Write every figure and the numbers behind them (`data.json`) to `folder`."""
    data = studies.all_studies()
    written = [folder / DATA]
    with atomic_file(written[0]) as file:
        file.write(to_json(data))
    with plt.rc_context({**_STYLE, "axes.prop_cycle": plt.cycler(color=_COLOURS)}):
        for draw in (
            _lanes_and_delay,
            _hidden_latency,
            _schemes,
            _budgets,
            _context,
            _larger_models,
            _node_cost,
            _agent_loop,
        ):
            figure = draw(data)
            path = folder / f"{draw.__name__.lstrip('_').replace('_', '-')}.svg"
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)
            text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
            with atomic_file(path) as file:
                file.write(text)
            written.append(path)
    return written


def to_json(data: dict[str, list[dict[str, Any]]]) -> str:
    """One row a line, so that a change of one number is a change of one line."""
    parts = []
    for name, rows in data.items():
        body = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        parts.append(f" {json.dumps(name)}: [\n{body}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lanes_and_delay(data: Any) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True)
    lines = [
        (8, "free", False, "8 lanes", "o-", 3),
        (8, "free", True, "8 lanes, first δ layers wait", "v:", 1),
        (8, "in order", False, "8 lanes, sums one by one", "D--", 4),
        (4, "free", False, "4 lanes of 2 GPUs", "s-", 2),
        (2, "free", False, "2 lanes of 4 GPUs", "^-", 0),
    ]
    for axis, us in zip(axes, studies.LATENCIES_US, strict=True):
        for lanes, links, early, label, style, colour in lines:
            rows = [
                row
                for row in data["lanes_and_delay"]
                if (row["collective_us"], row["lanes"], row["links"], row["early"])
                == (us, lanes, links, early)
            ]
            axis.plot(
                [row["delay"] for row in rows],
                [row["tokens_per_second"] for row in rows],
                style,
                markersize=4,
                color=_COLOURS[colour],
                label=label,
            )
        axis.set_title(f"sum across GPUs: {us} µs")
        axis.set_xlabel("delay δ (layers); 0: ordinary")
        axis.set_xticks(studies.DELAYS)
    axes[0].set_ylabel("tok/s, 8× H200 (projection)")
    axes[0].set_ylim(0)
    axes[0].legend(loc="lower right", fontsize=7)
    figure.tight_layout()
    return figure


def _hidden_latency(data: Any) -> Any:
    figure, axis = plt.subplots(figsize=(5, 3))
    for node in studies.NODES:
        rows = [row for row in data["hidden_latency"] if row["node"] == node]
        axis.plot(
            [row["delay"] for row in rows], [row["hidden_us"] for row in rows], "o-", label=node
        )
    for us in studies.LATENCIES_US:
        axis.axhline(us, color="#666666", linestyle=":", linewidth=1)
        axis.text(4.05, us, f"{us} µs", va="center", fontsize=8)
    axis.set_xticks(studies.DELAYS[1:])
    axis.set_xlabel("delay δ (layers)")
    axis.set_ylabel("longest sum hidden (µs)")
    axis.set_ylim(0)
    axis.legend()
    return figure


def _schemes(data: Any) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.9), sharey=True)
    names = ("pipeline", "tensor", "ladder", "delayed", "independent")
    for axis, node in zip(axes, ("h200x8", "mi300xx8"), strict=True):
        for number, us in enumerate(studies.LATENCIES_US):
            found = {
                row["scheme"]: row["tokens_per_second"]
                for row in data["schemes"]
                if row["node"] == node and row["collective_us"] == us
            }
            places = [place + 0.27 * (number - 1) for place in range(len(names))]
            axis.bar(places, [found[name] for name in names], 0.25, label=f"{us} µs")
        axis.set_xticks(
            range(len(names)),
            ["pipeline", "tensor\nparallel", "Ladder", "delayed\nδ = 2", "no\nexchange"],
        )
        axis.set_title(node)
    axes[0].set_ylabel("tok/s (projection)")
    axes[0].legend(title="sum across GPUs", fontsize=8)
    figure.tight_layout()
    return figure


def _budgets(data: Any) -> Any:
    rows = [row for row in data["budgets"] if row["costs"] != "kernels"]
    figure, axis = plt.subplots(figsize=(8, 3))
    left = [0.0] * len(rows)
    for number, kind in enumerate(KINDS):
        values = [row[kind] for row in rows]
        if any(values):
            axis.barh(range(len(rows)), values, 0.7, left=left, color=_COLOURS[number], label=kind)
            left = [a + b for a, b in zip(left, values, strict=True)]
    for place, row in enumerate(rows):
        axis.text(
            left[place] + 4, place, f"{row['tokens_per_second']:,} tok/s", va="center", fontsize=8
        )
    axis.set_yticks(range(len(rows)), [f"{row['node']}, {row['costs']}" for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, max(left) * 1.18)
    axis.set_xlabel("µs of one token on the critical path (projection)")
    axis.legend(ncol=6, loc="lower center", bbox_to_anchor=(0.45, 1.0), fontsize=8)
    return figure


def _context(data: Any) -> Any:
    figure, axis = plt.subplots(figsize=(5, 3))
    for kind in dict.fromkeys(row["attention"] for row in data["context"]):
        rows = [row for row in data["context"] if row["attention"] == kind]
        axis.plot(
            [row["context"] for row in rows],
            [row["tokens_per_second"] for row in rows],
            "o-",
            markersize=4,
            label=kind,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks([256, 1024, 4096, 16384, 65536], ["256", "1k", "4k", "16k", "64k"])
    axis.axvline(4096, color="#666666", linestyle=":", linewidth=1)
    axis.text(4096, 100, " trained context", fontsize=8)
    axis.set_xlabel("positions in the cache")
    axis.set_ylabel("tok/s, 8× H200 (projection)")
    axis.set_ylim(0)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 0.1))
    return figure


def _larger_models(data: Any) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.9), sharey=True)
    for axis, node in zip(axes, ("h200x8", "mi300xx8"), strict=True):
        rows = [row for row in data["larger_models"] if row["node"] == node]
        models = list(dict.fromkeys(row["model"] for row in rows))
        series = [
            ("ceiling", "assumed", "bandwidth ceiling"),
            ("delayed", "assumed", "delayed, assumed costs"),
            ("delayed", "fitted", "delayed, fitted costs"),
            ("tensor", "assumed", "tensor parallel, assumed costs"),
        ]
        for number, (key, costs, label) in enumerate(series):
            values = [row[key] for row in rows if row["costs"] == costs]
            places = [place + 0.2 * (number - 1.5) for place in range(len(models))]
            axis.bar(places, values, 0.19, label=label)
        names = [name.replace("-active", "").replace("laneformer-", "") for name in models]
        axis.set_xticks(range(len(models)), names)
        axis.set_yscale("log")
        axis.set_title(node)
    axes[0].set_ylabel("tok/s (projection)")
    figure.tight_layout()
    axes[0].legend(ncol=4, fontsize=8, loc="lower left", bbox_to_anchor=(0.1, 1.1))
    return figure


def _node_cost(data: Any) -> Any:
    figure, axis = plt.subplots(figsize=(6, 3))
    rows = [row for row in data["node_cost"] if row["scheme"] == "delayed"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    for number, node in enumerate(studies.NODES):
        values = [row["dollars_per_million"] for row in rows if row["node"] == node]
        places = [place + 0.2 * (number - 1.5) for place in range(len(models))]
        axis.bar(places, values, 0.19, label=node)
    axis.set_xticks(range(len(models)), models)
    axis.set_ylabel("US$ per million tokens\n(projection, one request)")
    axis.legend()
    return figure


def _agent_loop(data: Any) -> Any:
    rows = data["agent_loop"]
    figure, axis = plt.subplots(figsize=(6, 2.6))
    names = [f"{row['tokens_per_second']:,}" for row in rows]
    generation = [row["generation_s"] for row in rows]
    tools = [row["tools_s"] for row in rows]
    axis.barh(names, generation, 0.7, label="generation")
    axis.barh(names, tools, 0.7, left=generation, label="tools")
    for place, row in enumerate(rows):
        total = row["generation_s"] + row["tools_s"]
        axis.text(
            total + 10, place, f"{100 * row['share']:.0f} % generation", va="center", fontsize=8
        )
    axis.invert_yaxis()
    axis.set_xlim(0, 2150)
    axis.set_ylabel("tok/s")
    axis.set_xlabel("seconds for 50,000 tokens in 24 steps (made-up trace)")
    axis.legend(loc="lower right")
    return figure
