"""The design questions of docs/latency.md as plain data: what the figures draw and the tables say.

Every figure here is a projection: simulated from assumed or fitted costs, measured by nobody.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from laneformer_jax.hardware import DEVICES, Node, find_node
from laneformer_jax.latency import agent, calibrate
from laneformer_jax.latency.assumptions import PRICES, US, Engine, engine_for
from laneformer_jax.latency.budget import Budget, simulate
from laneformer_jax.latency.models import DENSE, EXPERTS, find_workload
from laneformer_jax.latency.schedule import KINDS
from laneformer_jax.latency.workload import from_config

MODEL = "laneformer-2b"
NODES = tuple(f"{name}x8" for name in DEVICES)
LATENCIES_US = (3, 8, 15)
LANES = (1, 2, 4, 8)
DELAYS = (0, 1, 2, 3, 4)


def fitted_engine(node: Node) -> Engine | None:
    """The persistent engine fitted to the speed published for this node, None where there is none."""
    known = calibrate.read(calibrate.PUBLISHED)
    if node.name not in {m.hardware for m in known.measurements}:
        return None
    return calibrate.apply(known, engine_for(node.device), node)


def speed(
    node: Node, engine: Engine, lanes: int, delay: int, model: str = MODEL, **kw: Any
) -> Budget:
    """A token of `model` at a delay in layers; 0, or one lane, is ordinary tensor parallelism."""
    scheme = "tensor" if delay == 0 or lanes == 1 else "delayed"
    workload = find_workload(model, lanes=lanes, delay=delay or None, **kw)
    return simulate(workload, node, engine, scheme)


def lanes_and_delay() -> list[dict[str, Any]]:
    """tok/s on 8× H200 for lanes × delay × collective latency.

    `links`: sums overtake nothing but each other's wire time (`free`), or run one by one
    (`in order`). `early`: whether the first δ layers wait for their sums.
    """
    node, rows = find_node("h200x8"), []
    for us in LATENCIES_US:
        for links, early in (("free", False), ("in order", False), ("free", True)):
            engine = replace(
                engine_for(node.device), collective=us * US, in_order=links == "in order"
            )
            for lanes in LANES if (links, early) == ("free", False) else (8,):
                for delay in DELAYS:
                    overrides = [f"use_early_comm={str(early).lower()}"]
                    found = speed(node, engine, lanes, delay, overrides=overrides)
                    rows.append(
                        {
                            "collective_us": us,
                            "links": links,
                            "early": early,
                            "lanes": lanes,
                            "delay": delay,
                            "tokens_per_second": _rate(found),
                        }
                    )
    return rows


def lanes_are_devices() -> list[dict[str, Any]]:
    """tok/s with one lane on each of 1, 2, 4 and 8 H200, beside ordinary tensor parallelism."""
    rows = []
    for us in LATENCIES_US:
        for lanes in LANES:
            node = find_node(f"h200x{lanes}")
            engine = replace(engine_for(node.device), collective=us * US)
            rows.append(
                {
                    "collective_us": us,
                    "devices": lanes,
                    "delayed": _rate(speed(node, engine, lanes, 2)),
                    "tensor": _rate(speed(node, engine, lanes, 0)),
                }
            )
    return rows


def hidden_latency() -> list[dict[str, Any]]:
    """The longest sum in µs that a delay hides entirely, per node and delay, one lane per device.

    A delay that hides the sums of a node is enough: more buys nothing.
    """
    rows = []
    for name in NODES:
        node = find_node(name)
        for delay in DELAYS[1:]:
            engine = replace(engine_for(node.device), collective=0.0)
            slack = speed(node, engine, 8, delay).slack
            assert slack is not None
            rows.append({"node": name, "delay": delay, "hidden_us": round(slack / US, 1)})
    return rows


def schemes() -> list[dict[str, Any]]:
    """tok/s of every scheme on the published nodes, by collective latency."""
    rows = []
    for name in ("h200x8", "mi300xx8"):
        node = find_node(name)
        workload = find_workload(MODEL)
        for us in LATENCIES_US:
            engine = replace(engine_for(node.device), collective=us * US)
            for scheme in ("pipeline", "tensor", "ladder", "delayed", "independent"):
                found = simulate(workload, node, engine, scheme)
                rows.append(
                    {
                        "node": name,
                        "collective_us": us,
                        "scheme": scheme,
                        "tokens_per_second": _rate(found),
                    }
                )
    return rows


def budgets() -> list[dict[str, Any]]:
    """Where a token's time goes on every node: assumed costs, fitted costs, one kernel per step."""
    rows = []
    for name in NODES:
        node = find_node(name)
        engines = {"assumed": engine_for(node.device), "fitted": fitted_engine(node)}
        engines["kernels"] = engine_for(node.device, "kernels")
        for label, engine in engines.items():
            if engine is not None:
                found = simulate(find_workload(MODEL), node, engine)
                exposed = {kind: round(found.terms[kind].exposed / US, 1) for kind in KINDS}
                rows.append(
                    {"node": name, "costs": label, "tokens_per_second": _rate(found), **exposed}
                )
    return rows


def context() -> list[dict[str, Any]]:
    """tok/s against positions in the cache on 8× H200, with the release's windows and without."""
    node = find_node("h200x8")
    engine = engine_for(node.device)
    full = replace(find_workload(MODEL).config, max_position_embeddings=131072)
    kinds = {"10 of 15 layers windowed": full, "all full": replace(full, swa_layers=())}
    return [
        {
            "attention": kind,
            "context": positions,
            "tokens_per_second": _rate(simulate(from_config(config, positions), node, engine)),
        }
        for kind, config in kinds.items()
        for positions in (2**power for power in range(8, 18))
    ]


def larger_models() -> list[dict[str, Any]]:
    """tok/s of larger shapes: bandwidth ceiling, delayed, ordinary tensor parallelism."""
    rows = []
    for name in ("h200x8", "mi300xx8"):
        node = find_node(name)
        for model in (MODEL, *DENSE, *EXPERTS):
            workload = find_workload(model)
            for label, engine in (
                ("assumed", engine_for(node.device)),
                ("fitted", fitted_engine(node)),
            ):
                assert engine is not None
                delayed = simulate(workload, node, engine)
                tensor = simulate(workload, node, engine, "tensor")
                rows.append(
                    {
                        "node": name,
                        "model": model,
                        "costs": label,
                        "gigabytes_per_token": round(workload.weight_bytes / 1e9, 2),
                        "ceiling": round(1 / delayed.bytes_bound),
                        "delayed": _rate(delayed),
                        "tensor": _rate(tensor),
                    }
                )
    return rows


def node_cost() -> list[dict[str, Any]]:
    """US dollars per million tokens of one request that has the whole node."""
    rows = []
    for name in NODES:
        node = find_node(name)
        for model in (MODEL, "8b", "30b", "moe-5b-active"):
            for scheme in ("delayed", "tensor"):
                found = simulate(find_workload(model), node, None, scheme)
                rows.append(
                    {
                        "node": name,
                        "model": model,
                        "scheme": scheme,
                        "dollars_per_million": round(
                            dollars_per_million(node, found.tokens_per_second), 2
                        ),
                    }
                )
    return rows


def dollars_per_million(node: Node, tokens_per_second: float, price: float | None = None) -> float:
    """Node cost of a million tokens at batch one; `price` in dollars per GPU and hour."""
    price = PRICES[node.device.name.lower()] if price is None else price
    return price * node.count / 3600 / tokens_per_second * 1e6


def agent_loop() -> list[dict[str, Any]]:
    """Wall time of the example trace by decode speed."""
    steps = agent.read_trace(agent.EXAMPLE)
    rows = []
    for rate in (30, 100, 300, 1000, 2100, 3000):
        found = agent.loop(steps, rate)
        rows.append(
            {
                "tokens_per_second": rate,
                "generation_s": round(found.generation, 1),
                "tools_s": round(found.tools, 1),
                "share": round(found.share, 3),
            }
        )
    return rows


@cache
def all_studies() -> dict[str, list[dict[str, Any]]]:
    """Every study by name, as in docs/latency/data.json."""
    studies = (
        lanes_and_delay,
        lanes_are_devices,
        hidden_latency,
        schemes,
        budgets,
        context,
        larger_models,
        node_cost,
        agent_loop,
    )
    return {study.__name__: study() for study in studies}


def choice_table() -> str:
    """The table of docs/latency.md: 8 lanes on 8× H200 by delay and collective latency.

    A cell holds early layers apart, early layers waiting, and sums run one by one.
    """
    found = {
        (row["collective_us"], row["delay"], row["links"], row["early"]): row["tokens_per_second"]
        for row in all_studies()["lanes_and_delay"]
        if row["lanes"] == 8
    }
    lines = ["| δ | " + " | ".join(f"{us} µs" for us in LATENCIES_US) + " |"]
    lines.append("|---|" + "---|" * len(LATENCIES_US))
    for delay in DELAYS:
        kinds = (("free", False), ("free", True), ("in order", False))
        cells = (
            " · ".join(f"{found[us, delay, *kind]:,}" for kind in kinds[: 3 if delay else 1])
            for us in LATENCIES_US
        )
        lines.append(f"| {delay or '0, ordinary'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def devices_table() -> str:
    """The table of docs/latency.md: one lane per GPU on 1 to 8 H200."""
    rows = all_studies()["lanes_are_devices"]
    lines = ["| GPUs = lanes | " + " | ".join(f"{us} µs" for us in LATENCIES_US) + " |"]
    lines.append("|---|" + "---|" * len(LATENCIES_US))
    for lanes in LANES:
        found = [row for row in rows if row["devices"] == lanes]
        cells = (f"{row['delayed']:,} ({row['tensor']:,})" for row in found)
        lines.append(f"| {lanes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hidden_table() -> str:
    """The table of docs/latency.md: the longest sum that a delay hides."""
    rows = all_studies()["hidden_latency"]
    lines = ["| node | " + " | ".join(f"δ = {delay}" for delay in DELAYS[1:]) + " |"]
    lines.append("|---|" + "---|" * len(DELAYS[1:]))
    for node in NODES:
        cells = (f"{row['hidden_us']:g} µs" for row in rows if row["node"] == node)
        lines.append(f"| {node} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rate(found: Budget) -> int:
    return round(found.tokens_per_second)
