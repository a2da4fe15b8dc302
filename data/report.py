"""`laneformer data report`: what a mixture holds, in a table, JSON and a picture."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np

from data.config import DataConfig
from data.documents import SKIP_REASONS, Encoder
from data.evaluation import once
from data.mixture import Weights
from data.pipeline import closing, open_encoders
from data.sources.subset import Subset
from data.workers import Workers
from laneformer_jax.files import atomic_file
from laneformer_jax.progress import progress
from laneformer_jax.tokenizer import Tokenizer

_RUN = 100_000_000  # tokens of the run that repeats are told for


def measure(
    config: DataConfig, tokenizer: Tokenizer, seq_len: int, max_documents: int | None = None
) -> dict[str, Any]:
    """Read every source once and count.

    Args:
        config: the mixture; its training documents are read.
        tokenizer: counts the tokens.
        seq_len: rows of this length are what `longer_than_row` and `fill` are judged by.
        max_documents: stop after so many of each source.

    Returns:
        `sources`: per name `documents`, `tokens`, `share` (of the mixture's tokens when a run
        begins) and `final_share` (at the end of the schedule), `epochs_100m` (passes in the first
        100 M tokens), `tokens_share` (of all tokens here), `bytes_per_token`, `longest` (tokens),
        `longer_than_row`, `truncated`, `duplicates`, `skipped` by reason, `contaminated` documents
        with the first task each overlaps, and `lengths`, a histogram over powers of two.
    """
    encoders = open_encoders(config, tokenizer, "train", seq_len)
    with contextlib.closing(Workers(encoders, config.num_workers, config.read_threads)) as workers:
        out = {
            e.name: _of_source(once("train", config, workers, i), e, seq_len, max_documents)
            for i, e in enumerate(encoders)
        }
    weights = Weights.of(config, streams=1)
    begin, end = (_shares(weights, tokens) for tokens in (0, weights.tokens[-1]))
    over_100m = np.mean([_shares(weights, tokens) for tokens in range(0, _RUN, _RUN // 1000)], 0)
    total = sum(s["tokens"] for s in out.values())
    for i, source in enumerate(out.values()):
        source["share"], source["final_share"] = begin[i], end[i]
        source["tokens_share"] = source["tokens"] / max(total, 1)
        source["epochs_100m"] = over_100m[i] * _RUN / source["tokens"] if source["tokens"] else None
    return {"seq_len": seq_len, "sources": out}


def _shares(weights: Weights, tokens: int) -> list[float]:
    at = weights.at(tokens)
    return [w / sum(at) for w in at]


def _of_source(
    dataset: grain.IterDataset, encoder: Encoder, seq_len: int, max_documents: int | None
) -> dict[str, Any]:
    lengths: list[int] = []
    size = truncated = 0
    skipped: dict[str, int] = {}
    contaminated = []
    with (
        closing(dataset) as documents,
        progress(encoder.size, f"read {encoder.name}", "documents") as bar,
    ):
        for index, document in enumerate(documents):
            if index == max_documents:
                break
            bar.advance()
            if document["skip"]:
                reason = SKIP_REASONS[document["skip"]]
                skipped[reason] = skipped.get(reason, 0) + 1
                if reason == "contaminated" and encoder.source is not None:
                    contaminated.append(_overlap(encoder, index))
                continue
            lengths.append(len(document["example"]))
            size += document["bytes"]
            truncated += document["truncated"]
    tokens = int(np.sum(lengths)) if lengths else 0
    repeats = encoder.source.duplicates if isinstance(encoder.source, Subset) else 0
    return {
        "documents": len(lengths),
        "tokens": tokens,
        "bytes_per_token": size / max(tokens, 1),
        "longest": max(lengths, default=0),
        "longer_than_row": int(np.sum(np.asarray(lengths) > seq_len)),
        "truncated": truncated,
        "duplicates": repeats + skipped.pop("duplicate", 0),
        "skipped": skipped,
        "contaminated": contaminated,
        "lengths": _histogram(lengths),
    }


def _overlap(encoder: Encoder, index: int) -> dict[str, str]:
    from data.documents import texts_of

    assert encoder.source is not None
    assert encoder.benchmarks is not None
    text = "\n".join(texts_of(encoder.source[index], encoder.config))
    task = encoder.benchmarks.overlap(text)
    return {"document": encoder.source.where(index), "task": task or ""}


def _histogram(lengths: list[int]) -> dict[str, int]:
    """Documents by length: the key is the largest power of two that is not above it."""
    if not lengths:
        return {}
    powers, found = np.unique(np.floor(np.log2(lengths)).astype(int), return_counts=True)
    return {str(2**p): int(n) for p, n in zip(powers.tolist(), found.tolist(), strict=True)}


def table(report: Mapping[str, Any]) -> str:
    """The report as text for a terminal."""
    head = (
        "source", "documents", "tokens", "weight", "epochs/100M", "bytes/token", "longest",
        "long", "truncated", "duplicates", "skipped",
    )  # fmt: skip
    rows = [head]
    for name, s in report["sources"].items():
        skipped = ", ".join(f"{k} {v}" for k, v in s["skipped"].items()) or "-"
        share = f"{s['share']:.1%}"
        if s["final_share"] != s["share"]:
            share += f" to {s['final_share']:.1%}"
        epochs = s["epochs_100m"]
        rows.append(
            (
                name,
                f"{s['documents']:,}",
                f"{s['tokens']:,}",
                share,
                "-" if epochs is None else f"{epochs:.1f}",
                f"{s['bytes_per_token']:.2f}",
                f"{s['longest']:,}",
                f"{s['longer_than_row']:,}",
                f"{s['truncated']:,}",
                f"{s['duplicates']:,}",
                skipped,
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i in (0, len(head) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    notes = [
        "weight: share of the mixture's tokens, at the beginning and the end of the schedule;"
        " epochs/100M: passes over the source in the first 100 M tokens of a run;",
        f"long: documents of more than one row of {report['seq_len']} tokens.",
    ]
    for name, s in report["sources"].items():
        for hit in s["contaminated"]:
            notes.append(f"left out of {name}: {hit['document']} overlaps {hit['task']}")
    return "\n".join([*lines, "", *notes])


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write `report.json`, `report.txt` and `report.png` into `folder`."""
    with atomic_file(folder / "report.json") as file:
        json.dump(report, file, indent=1)
    with atomic_file(folder / "report.txt") as file:
        file.write(table(report) + "\n")
    figure = _plot(report)
    with atomic_file(folder / "report.png", "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _plot(report: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    shares, lengths = figure.subplots(1, 2)
    names = list(report["sources"])
    places = np.arange(len(names))
    bars = [("tokens_share", "tokens held"), ("share", "weight")]
    if any(s["final_share"] != s["share"] for s in report["sources"].values()):
        bars.append(("final_share", "weight at the end"))
    height = 0.8 / len(bars)
    for i, (key, label) in enumerate(bars):
        widths = [report["sources"][n][key] for n in names]
        shares.barh(places + (i - len(bars) / 2 + 0.5) * height, widths, height, label=label)
    shares.set_yticks(places, names)
    shares.invert_yaxis()
    shares.set_xlabel("share of the mixture")
    shares.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    shares.legend()
    for name in names:
        histogram = report["sources"][name]["lengths"]
        x = [int(k) for k in histogram]
        documents = max(report["sources"][name]["documents"], 1)
        lengths.step(x, [n / documents for n in histogram.values()], where="mid", label=name)
    lengths.axvline(report["seq_len"], color="grey", linewidth=1, linestyle=":")
    lengths.set_xscale("log", base=2)
    lengths.set_xlabel("tokens of a document (dotted: a row)")
    lengths.set_ylabel("share of documents")
    lengths.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    lengths.legend()
    return figure
