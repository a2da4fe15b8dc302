"""How fast one request decodes on a node of GPUs, simulated from a model's shape and a hardware table.

    laneformer latency --model laneformer-2b --hardware h200x8
    laneformer latency --hardware mi300xx8 --delay 0 --assume collective=8us
    laneformer latency --published

Nothing is run on the hardware: tok/s printed here are projections from published and assumed costs
(docs/latency.md), unless --calibrate replaces them by measured ones.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from laneformer_jax.errors import UserError, nearest
from laneformer_jax.hardware import DEVICES, Node, find_node
from laneformer_jax.latency import agent
from laneformer_jax.latency.assumptions import ENGINES, US, Engine, engine_for
from laneformer_jax.latency.budget import Budget, simulate
from laneformer_jax.latency.calibrate import PUBLISHED, apply, check_parameter, read
from laneformer_jax.latency.models import NAMES, find_workload
from laneformer_jax.latency.schedule import SCHEMES
from laneformer_jax.latency.studies import dollars_per_million
from laneformer_jax.latency.workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="other config values")
    parser.add_argument(
        "--model",
        default="laneformer-2b",
        help=f"{', '.join(NAMES)}, a config.json or a folder (default: laneformer-2b)",
    )
    parser.add_argument(
        "--hardware",
        default="h200x8",
        metavar="NODE",
        help=f"{', '.join(DEVICES)}, with x and a number of GPUs (default: h200x8)",
    )
    parser.add_argument("--lanes", type=int, metavar="L", help="num_lanes (default: the model's)")
    parser.add_argument(
        "--delay",
        type=int,
        metavar="LAYERS",
        help="broadcast_delay (default: the model's); 0 is ordinary tensor parallelism",
    )
    parser.add_argument("--scheme", choices=SCHEMES, help="default: delayed")
    parser.add_argument("--context", type=int, metavar="S", help="positions in the cache")
    parser.add_argument("--weight-bits", type=int, choices=(16, 8, 4), default=16)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="persistent",
        help="one kernel for all tokens, one per step, or bytes and FLOPs only",
    )
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another cost of the engine, such as barrier=2us or bandwidth=4e12",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="JSON of measured costs and speeds; `published` fits the two published speeds",
    )
    parser.add_argument("--price", type=float, metavar="USD", help="per GPU and hour")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="agent steps (JSON lines) to time at this speed"
    )
    parser.add_argument(
        "--published", action="store_true", help="published figures beside what this model gives"
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write the figures of the docs")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")


def run(args: argparse.Namespace) -> int:
    if args.published:
        return _published(args.json)
    if args.figures is not None:
        from laneformer_jax.latency import figures

        for path in figures.write(args.figures):
            print(path)
        return 0
    node = find_node(args.hardware)
    scheme = args.scheme or ("tensor" if args.delay == 0 else "delayed")
    if args.delay is not None and (args.delay == 0) != (scheme == "tensor"):
        raise UserError(
            f"delay: {args.delay} does not go with --scheme {scheme}; drop one of the two"
        )
    workload = find_workload(
        args.model, args.context, args.weight_bits, args.overrides, args.lanes, args.delay
    )
    engine = _engine(args, node)
    figures_ = describe(workload, node, engine, scheme, args.price)
    if args.trace is not None:
        steps = agent.read_trace(args.trace)
        found = agent.loop(steps, figures_["tokens_per_second"])
        figures_["agent"] = {
            "steps": len(steps),
            "tokens": sum(step.tokens for step in steps),
            "generation_seconds": found.generation,
            "tool_seconds": found.tools,
            "generation_share": found.share,
        }
    if args.json:
        print(json.dumps({"model": args.model, **figures_}))
    else:
        _print(args.model, figures_)
    return 0


def describe(
    workload: Workload, node: Node, engine: Engine, scheme: str, price: float | None = None
) -> dict[str, Any]:
    """The figures of `laneformer latency --json`; bytes are of one device, times in seconds."""
    if price is not None and not price > 0:
        raise UserError(f"price: {price} must be above 0")
    need = workload.weight_bytes / node.count
    if need > node.device.memory:
        raise UserError(
            f"hardware: {need / 1e9:.0f} GB of weights read per token and device exceed the "
            f"{node.device.memory / 1e9:.0f} GB of {node.device.name}"
        )
    found: Budget = simulate(workload, node, engine, scheme)
    vendor = found.bytes_bound * engine.bandwidth / node.device.memory_bandwidth
    return {
        "hardware": node.name,
        "engine": engine.name,
        "scheme": found.scheme,
        "lanes": workload.config.num_lanes,
        "delay_layers": workload.config.broadcast_delay if found.scheme == "delayed" else 0,
        "context": workload.context,
        "tokens_per_second": found.tokens_per_second,
        "seconds_per_token": found.seconds,
        "utilisation": found.utilisation,
        "utilisation_of_vendor_peak": vendor / found.seconds,
        "ceiling_tokens_per_second": 1 / found.bytes_bound,
        "binding_term": found.binding,
        "weight_bytes": round(found.weight_bytes),
        "kv_bytes": round(found.kv_bytes),
        "collective_bytes": round(found.collective_bytes),
        "collectives_waited_for": found.exposed_collectives,
        "late_sum_slack_seconds": found.slack,
        "dollars_per_million_tokens": dollars_per_million(node, found.tokens_per_second, price),
        "terms": {
            kind: {
                "count": term.count,
                "seconds": term.seconds,
                "exposed": term.exposed,
                "hidden": term.hidden,
            }
            for kind, term in found.terms.items()
        },
    }


def _engine(args: argparse.Namespace, node: Node) -> Engine:
    engine = engine_for(node.device, args.engine)
    if args.calibrate is not None:
        path = PUBLISHED if args.calibrate == "published" else Path(args.calibrate)
        engine = apply(read(path), engine, node)
    names = [f.name for f in fields(Engine) if f.name not in ("name", "in_order")]
    for text in args.assume:
        name, equals, value = text.partition("=")
        if name not in names:
            hint = nearest(name, names) or f"; costs: {', '.join(names)}"
            raise UserError(f"assume: {name!r} is unknown{hint}")
        number = re.fullmatch(r"(.+?)(us|µs)?", value) if equals else None
        try:
            parsed = float(number[1]) * (US if number[2] else 1) if number else float("nan")
        except ValueError:
            parsed = float("nan")
        check_parameter(name, parsed, f"assume: {text!r}: ")
        engine = replace(engine, **{name: parsed})  # type: ignore[arg-type]
    return engine


def _published(as_json: bool) -> int:
    from laneformer_jax.latency.published import comparisons

    rows = comparisons()
    if as_json:
        listed = [{"name": r.name, "published": r.published, "ours": r.ours} for r in rows]
        print(json.dumps({"published": listed}))
        return 0
    table = _table("figure", "published", "ours", "")
    for row in rows:
        said = f"{'<' if row.digits is None else ''}{row.published:,g}"
        table.add_row(row.name, said, f"{row.ours:,.1f}", "agrees" if row.agrees else "differs")
    _show(table)
    return 0


def _print(model: str, found: dict[str, Any]) -> None:
    price = f"{found['dollars_per_million_tokens']:.2f} US$ per million tokens"
    print(
        f"{model} on {found['hardware']}, {found['lanes']} lanes, {_scheme(found)}, "
        f"{found['context']:,} positions, {found['engine']} engine (projection)"
    )
    table = _table("of one token, per device", "count", "µs in all", "µs waited for", "µs hidden")
    for kind, term in found["terms"].items():
        if term["seconds"] > 0:
            cells = (f"{term[key] / US:.1f}" for key in ("seconds", "exposed", "hidden"))
            table.add_row(kind, str(term["count"]), *cells)
    _show(table)
    slack = found["late_sum_slack_seconds"]
    lines = [
        ("token", f"{found['seconds_per_token'] / US:.1f} µs"),
        ("speed", f"{found['tokens_per_second']:,.0f} tok/s; {price}"),
        (
            "utilisation",
            f"{100 * found['utilisation']:.1f} % of a ceiling of "
            f"{found['ceiling_tokens_per_second']:,.0f} tok/s "
            f"({100 * found['utilisation_of_vendor_peak']:.1f} % of the vendor's bandwidth)",
        ),
        ("binding term", found["binding_term"]),
        (
            "bytes",
            f"{found['weight_bytes'] / 1e6:.1f} MB of weights, {found['kv_bytes'] / 1e6:.1f} MB "
            f"of KV, {found['collective_bytes'] / 1e6:.2f} MB sent",
        ),
    ]
    if slack is not None:
        how = "early" if slack >= 0 else "late"
        lines.append(("late sums", f"the tightest arrives {abs(slack) / US:.1f} µs {how}"))
    if "agent" in found:
        one = found["agent"]
        lines.append(
            (
                "agent loop",
                f"{one['generation_seconds']:.1f} s generating {one['tokens']:,} tokens, "
                f"{one['tool_seconds']:.1f} s in tools: {100 * one['generation_share']:.0f} % "
                "generation",
            )
        )
    for name, text in lines:
        print(f"  {name:<13} {text}")


def _scheme(found: dict[str, Any]) -> str:
    if found["scheme"] == "delayed":
        layers = found["delay_layers"]
        return f"δ = {layers} layer{'s' * (layers != 1)}"
    return {
        "tensor": "ordinary tensor parallelism",
        "ladder": "Ladder Residual",
        "independent": "lanes that never hear each other",
        "pipeline": "pipeline of layers",
    }[found["scheme"]]


def _table(first: str, *more: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first)
    for title in more:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _show(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
