"""Results as JSON lines, a Markdown table and plots; nothing is claimed that the seeds do not tell."""

from __future__ import annotations

import io
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file
from train.ablate.config import expand
from train.ablate.runs import RUNS, Ablation
from train.ablate.stats import Gap, paired_gap

RESULTS, TABLE = "results.jsonl", "table.md"
_SVG = {"svg.fonttype": "none", "svg.hashsalt": "laneformer", "axes.grid": True, "grid.alpha": 0.3}


def collect(ablation: Ablation) -> list[dict[str, Any]]:
    """The results there are: tuning runs first, each with its `role`.

    A folder that holds `results.jsonl` and no runs, as one that was published, is read from it.
    """
    written = ablation.folder / RESULTS
    if written.exists() and not (ablation.folder / RUNS).exists():
        return [json.loads(line) for line in written.read_text().splitlines()]
    rows = []
    for run in ablation.tuning():
        found = ablation.result(run)
        if found is not None:
            rows.append({"role": "tune", **found})
    try:
        compared = ablation.comparison()
    except UserError:  # not every cell is tuned yet
        compared = []
    for run in compared:
        found = ablation.result(run)
        if found is not None:
            rows.append({"role": "compare", **found})
    for row in rows:  # not where this machine keeps it
        tokenizer = Path(row["run"]["tokenizer"])
        if tokenizer.is_relative_to(ablation.folder):
            row["run"]["tokenizer"] = tokenizer.relative_to(ablation.folder).as_posix()
    return rows


def gaps(ablation: Ablation, rows: list[dict[str, Any]]) -> dict[str, Gap | None]:
    """Each cell's paired gap to the baseline."""
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["role"] == "compare":
            losses[row["cell"]][row["seed"]] = row["eval_loss"]
    base = losses[ablation.config.baseline]
    return {cell: paired_gap(losses[cell], base) for cell in expand(ablation.config)}


def table(ablation: Ablation, rows: list[dict[str, Any]]) -> str:
    """A Markdown table, one cell a row."""
    lines = [
        "| cell | learning rate | seeds | held-out loss | gap to "
        f"{ablation.config.baseline} | 95 % interval | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    found = gaps(ablation, rows)
    for cell, gap in found.items():
        own = [r for r in rows if r["role"] == "compare" and r["cell"] == cell]
        if not own:
            lines.append(f"| {cell} | | 0 | | | | not run |")
            continue
        rate = own[0]["learning_rate"]
        mean = statistics.fmean(r["eval_loss"] for r in own)
        edge = " (edge)" if _at_edge(ablation.config.learning_rates, rate) else ""
        shown = ["", "", "baseline"]
        if gap is not None and cell != ablation.config.baseline:
            interval = "" if gap.low is None else f"{gap.low:+.4f} … {gap.high:+.4f}"
            shown = [f"{gap.mean:+.4f}", interval, gap.verdict]
        elif cell != ablation.config.baseline:
            shown = ["", "", "no common seed"]
        lines.append(f"| {cell} | {rate:g}{edge} | {len(own)} | {mean:.4f} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def write(ablation: Ablation) -> str:
    """Write everything to the ablation's folder; gives the table."""
    rows = collect(ablation)
    text = table(ablation, rows)
    with atomic_file(ablation.folder / RESULTS) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with atomic_file(ablation.folder / TABLE) as file:
        file.write(text)
    compared = [row for row in rows if row["role"] == "compare"]
    if compared:
        _plot(ablation, compared, gaps(ablation, rows))
    return text


def _at_edge(rates: list[float], rate: float) -> bool:
    return len(rates) > 1 and rate in (min(rates), max(rates))


def _plot(ablation: Ablation, rows: list[dict[str, Any]], found: dict[str, Gap | None]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    cells = [cell for cell in found if any(row["cell"] == cell for row in rows)]
    with plt.rc_context(_SVG):  # type: ignore[arg-type]
        figure, axis = plt.subplots(figsize=(6, 4))
        for cell in cells:
            curves = [row["curve"] for row in rows if row["cell"] == cell]
            tokens = [point[0] for point in curves[0]]
            means = [statistics.fmean(c[i][1] for c in curves) for i in range(len(tokens))]
            axis.plot(tokens, means, label=cell)
        axis.set_xlabel("tokens")
        axis.set_ylabel("held-out loss (nats per token)")
        axis.legend(fontsize=7)
        _save(figure, ablation.folder / "loss.svg")

        for name, title in (("broadcast_delay", "delay δ (layers)"), ("num_lanes", "lanes")):
            figure, axis = plt.subplots(figsize=(6, 4))
            others = [c for c in cells if c != ablation.config.baseline and found[c] is not None]
            places = _apart(
                [next(r["model"][name] for r in rows if r["cell"] == c) for c in others]
            )
            for cell, place in zip(others, places, strict=True):
                gap = found[cell]
                assert gap is not None
                error = None if gap.high is None else [[gap.high - gap.mean]]
                axis.errorbar([place], [gap.mean], error, fmt="o", capsize=3, label=cell)
                seeds = list(gap.by_seed.values())
                axis.plot([place] * len(seeds), seeds, "_", color="#666666", zorder=3)
            axis.axhline(0, color="#666666", linewidth=1)
            axis.set_xlabel(title)
            axis.set_ylabel(f"loss gap to {ablation.config.baseline}; seeds, 95 % interval")
            if others:
                axis.legend(fontsize=7)
            _save(figure, ablation.folder / f"gap-{title.split()[0]}.svg")

        figure, axis = plt.subplots(figsize=(6, 4))
        for cell in cells:
            drifts = [row["drift"] for row in rows if row["cell"] == cell]
            axis.plot(
                [statistics.fmean(values) for values in zip(*drifts, strict=True)], "o-", label=cell
            )
        axis.set_xlabel("layer")
        axis.set_ylabel("lane divergence (0: all equal)")
        axis.legend(fontsize=7)
        _save(figure, ablation.folder / "drift.svg")


def _apart(places: list[float]) -> list[float]:
    """The same places, equal ones beside each other."""
    offsets: dict[float, int] = defaultdict(int)
    shown = []
    for place in places:
        shown.append(place + 0.1 * offsets[place])
        offsets[place] += 1
    return shown


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    with atomic_file(path) as file:
        file.write("\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n")
