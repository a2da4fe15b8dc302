"""The quickstart's report: a loss curve, one page of HTML, and a table on the terminal."""

from __future__ import annotations

import base64
import html
import io
import platform
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laneformer_jax.files import atomic_file
from train.metrics import JSONL, Record, read_jsonl

if TYPE_CHECKING:
    from train.quickstart import Story

PAGE, PICTURE = "report.html", "loss.png"
_TITLES = {"pretrain": "Pretraining", "midtrain": "Midtraining", "sft": "Instruction tuning"}


def write(out: Path, story: Story) -> None:
    """Write `loss.png` and `report.html` into `out`."""
    runs = {phase: read_jsonl(out / phase / JSONL) for phase in _TITLES}
    picture = _picture(runs, story)
    with atomic_file(out / PICTURE, "wb") as file:
        file.write(picture)
    with atomic_file(out / PAGE) as file:
        file.write(_page(runs, story, picture))


def print_summary(out: Path, story: Story) -> None:
    """The table and what to do next, on standard output."""
    from rich.console import Console
    from rich.table import Table

    runs = {phase: read_jsonl(out / phase / JSONL) for phase in _TITLES}
    table = Table(title="Quickstart", title_justify="left")
    for name in ("phase", "steps", "loss", "held-out loss", "tokens/s", "data wait", "time"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in _TITLES:
        table.add_row(*_row(phase, runs[phase], story))
    for name in ("tokenizer", "samples", "export"):
        table.add_row(name, *[""] * 5, _seconds(story.seconds[name]))
    console = Console(width=100)
    console.print(table)
    console.print(
        f"{story.parameters:,} parameters, {story.lanes} lanes, delay {story.delay}; "
        f"total {_seconds(sum(story.seconds.values()))}, "
        f"peak memory {story.peak_bytes / 1e9:.2f} GB",
        highlight=False,
    )
    if story.stopped_at is not None:
        console.print(
            f"stopped by SIGTERM after step {story.stopped_at} of pretraining, and resumed",
            highlight=False,
        )
    console.print(
        "\nNext:\n"
        f"  open {out / PAGE}\n"
        f'  laneformer generate {out / "sft"} --prompt "def main():"\n'
        f"  laneformer train --config quickstart/pretrain --out runs/longer \\\n"
        f"      tokenizer={out / 'tokenizer'} train.steps=2000\n"
        f"  laneformer info {out / 'hf'}",
        highlight=False,
        soft_wrap=True,
    )


def _row(phase: str, records: list[Record], story: Story) -> list[str]:
    updates = [r for r in records if "loss" in r]
    # The first updates of a process hold its compilation.
    speeds = [r["tokens_per_s"] for r in updates]
    waits = [r["data_wait"] for r in updates]
    return [
        _TITLES[phase],
        str(updates[-1]["step"]),
        f"{updates[0]['loss']:.2f} → {updates[-1]['loss']:.2f}",
        f"{story.eval_loss[phase]:.3f}",
        f"{statistics.median(speeds):,.0f}",
        f"{statistics.median(waits):.1%}",
        _seconds(story.seconds[phase]),
    ]


def _seconds(value: float) -> str:
    return f"{int(value) // 60}:{int(value) % 60:02d}"


def _picture(runs: dict[str, list[Record]], story: Story) -> bytes:
    """Loss over steps, the three phases one behind the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.2), dpi=120)
    start = 0
    for (phase, title), colour in zip(_TITLES.items(), ("C0", "C1", "C2"), strict=True):
        updates = [r for r in runs[phase] if "loss" in r]
        held_out = [r for r in runs[phase] if "eval_loss" in r]
        axes.plot(
            [start + r["step"] for r in updates],
            [r["loss"] for r in updates],
            color=colour,
            linewidth=1,
            label=title,
        )
        axes.plot(
            [start + r["step"] for r in held_out],
            [r["eval_loss"] for r in held_out],
            "o",
            color=colour,
            markeredgecolor="black",
            markersize=5,
            label="held-out files" if start == 0 else None,
        )
        if phase == "pretrain" and story.stopped_at is not None:
            axes.axvline(story.stopped_at, color="grey", linestyle=":", label="stop and resume")
        start += updates[-1]["step"]
        if phase != "sft":
            axes.axvline(start, color="lightgrey", linewidth=1)
    axes.set_xlabel("update")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, ncols=2)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2.5rem auto; padding: 0 1rem;
  color: #1c2330; background: #fff; }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
p.lead { color: #5a6473; margin-top: 0 } img { max-width: 100% }
table { border-collapse: collapse; width: 100% } th { text-align: left; color: #5a6473; font-weight: 500 }
th, td { padding: .35rem .6rem; border-bottom: 1px solid #e4e7ec; font-variant-numeric: tabular-nums }
td.n, th.n { text-align: right }
pre { background: #f5f7fa; padding: .8rem 1rem; border-radius: 6px; overflow-x: auto; white-space: pre-wrap }
pre b { color: #0b5fae; font-weight: 500 } pre.prompt { background: none; padding: 0; color: #5a6473 }
"""


def _page(runs: dict[str, list[Record]], story: Story, picture: bytes) -> str:
    head = ("", "steps", "loss", "held-out loss", "tokens/s", "data wait", "time")
    rows = "".join(
        "<tr>" + "".join(_cell(i, text) for i, text in enumerate(_row(p, runs[p], story))) + "</tr>"
        for p in _TITLES
    )
    stop = (
        f"Pretraining was stopped by SIGTERM after step {story.stopped_at} and resumed from its "
        "checkpoint. "
        if story.stopped_at is not None
        else ""
    )
    samples = "".join(_sample(p.title, p.text, answer, p.chat) for p, answer in story.samples)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Laneformer quickstart</title><style>{_STYLE}</style>
<h1>Laneformer quickstart</h1>
<p class="lead">{story.parameters:,} parameters, {story.lanes} lanes, exchange {story.delay} layers late;
trained on this machine's Python standard library in {_seconds(sum(story.seconds.values()))} minutes,
peak memory {story.peak_bytes / 1e9:.2f} GB ({_machine()}).</p>
<img alt="Loss over updates" src="data:image/png;base64,{base64.b64encode(picture).decode()}">
<h2>Phases</h2>
<table><tr>{"".join(_cell(i, t, "th") for i, t in enumerate(head))}</tr>{rows}</table>
<p>{stop}Held-out loss is the mean over tokens of files that neither the tokenizer nor the model saw.
Losses of different phases are of different texts.</p>
<h2>Samples, greedy</h2>
<p>A model of this size and training writes the look of Python, not its sense.</p>
{samples}
</html>
"""


def _cell(index: int, text: str, tag: str = "td") -> str:
    return f"<{tag}{' class=n' if index else ''}>{html.escape(text)}</{tag}>"


def _sample(title: str, prompt: str, answer: str, chat: bool) -> str:
    shown, written = html.escape(prompt), html.escape(answer)
    if chat:
        return f"<h2>{title}</h2><pre class=prompt>{shown}</pre><pre><b>{written}</b></pre>"
    return f"<h2>{title}</h2><pre>{shown}<b>{written}</b></pre>"


def _machine() -> str:
    import os

    import jax

    cores = len(os.sched_getaffinity(0))
    system: Any = platform.machine()
    return f"{cores} cores {system}, Python {platform.python_version()}, JAX {jax.__version__}"
