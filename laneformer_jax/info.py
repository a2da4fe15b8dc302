"""Parameters, memory and FLOPs of a model from its config, and what a folder holds, loading nothing.

MODEL is a preset, a config.json, or a folder that holds one: an exported model, a checkpoint or a
run. Without MODEL the presets are listed. FIELD=VALUE changes a field of the config first, such as
`laneformer info laneformer-2b num_hidden_layers=30`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from laneformer_jax import costs, settings
from laneformer_jax.checkpoint.contents import contents
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError, nearest
from laneformer_jax.presets import PRESETS, preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="preset, config.json or folder")
    parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="other field values")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=sorted(costs.BYTES),
        help="of weights and KV cache (default: bfloat16)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="S",
        help="positions for KV cache, decode and training (default: max_position_embeddings)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        return _list_presets(args.json)
    held = contents(Path(args.model)) if args.model not in PRESETS else None
    figures = None
    if held is None or held["kind"] != "dense":  # whose config.json speaks of another architecture
        config = settings.replace(find_config(args.model), args.overrides)
        figures = describe(config, args.dtype, args.context)
    name = " ".join([args.model, *args.overrides])
    if args.json:
        found = {} if held is None else {"contents": held}
        print(json.dumps({"model": name, **found, **(figures or {})}, indent=2))
        return 0
    if held is not None:
        _print_contents(args.model, held)
    if figures is not None:
        _print_table(name, figures)
    return 0


def find_config(name: str) -> LaneformerConfig:
    """The config of a preset, a config.json or a folder. Raises UserError when there is none."""
    if name in PRESETS:
        return preset(name)
    if Path(name).exists():
        return LaneformerConfig.from_json(_config_file(Path(name)))
    raise UserError(
        f"{name}: neither a preset nor a file or folder{nearest(name, PRESETS)}; "
        f"presets: {', '.join(PRESETS)}"
    )


def _config_file(path: Path) -> Path:
    """The config.json at `path`; of a run, that of its newest checkpoint, complete or not."""
    steps = [p for p in path.glob("checkpoints/*") if p.name.isdecimal()]
    newest = max(steps, key=lambda p: int(p.name), default=path)
    return path if path.is_file() or (path / "config.json").exists() else newest / "config.json"


def describe(
    config: LaneformerConfig, dtype: str = "bfloat16", context: int | None = None
) -> dict[str, Any]:
    """The figures of `laneformer info --json`; bytes, FLOPs and counts are plain numbers.

    Args:
        config: the model.
        dtype: of weights and KV cache; a key of `costs.BYTES`.
        context: positions in the cache, and sequence length in training; None for
            `max_position_embeddings`.

    Raises:
        UserError: `context` is not between 1 and `max_position_embeddings`.
    """
    limit = config.max_position_embeddings
    context = limit if context is None else context
    if not 1 <= context <= limit:
        raise UserError(f"context: {context} must be from 1 to max_position_embeddings {limit}")
    return {
        "dtype": dtype,
        "context": context,
        "lanes": config.num_lanes,
        "delay_layers": config.broadcast_delay,
        "parameters": config.num_parameters(),
        "parameter_groups": costs.parameter_groups(config),
        "weight_bytes": config.num_parameters() * costs.BYTES[dtype],
        "decode_weight_bytes_per_token": costs.decode_weight_bytes(config, dtype),
        "kv_bytes_per_layer_and_position": costs.kv_bytes_per_position(config, dtype),
        "kv_cache_bytes": costs.kv_cache_bytes(config, context, dtype),
        "kv_ring_bytes": costs.kv_ring_bytes(config, context, costs.PREFILL_CHUNK, dtype),
        "sliding_layers": sum(
            config.window(layer) is not None for layer in range(config.num_hidden_layers)
        ),
        "decode_flops_per_token": costs.decode_flops(config, context),
        "training_flops_per_token": round(costs.training_flops(config, context)),
        "lane_sums_per_token": config.lane_sums(),
        "waited_lane_sums_per_token": costs.waited_lane_sums(config),
    }


def _list_presets(as_json: bool) -> int:
    counts = {name: preset(name).num_parameters() for name in PRESETS}
    if as_json:
        print(json.dumps({"presets": counts}, indent=2))
        return 0
    table = _table("preset", "parameters")
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    _show(table)
    return 0


def _print_contents(name: str, held: dict[str, Any]) -> None:
    print(f"{name}: {held['holds']}")
    for key, value in held.items():
        if key not in ("holds", "kind"):
            text = f"{value:,} ({_size(value)})" if key == "bytes" else value
            text = ", ".join(map(str, value)) if isinstance(value, list) else text
            text = {True: "yes", False: "no"}.get(value, text) if isinstance(value, bool) else text
            print(f"  {key}: {text}")


def _print_table(name: str, figures: dict[str, Any]) -> None:
    sums, waited = figures["lane_sums_per_token"], figures["waited_lane_sums_per_token"]
    context = f"{figures['context']:,}"
    table = _table(name, "", "")
    table.add_row("parameters", f"{figures['parameters']:,}")
    for group, count in figures["parameter_groups"].items():
        table.add_row(f"  {group}", f"{count:,}")
    for row in (
        ("weights", _size(figures["weight_bytes"]), figures["dtype"]),
        (
            "weights read per token",
            _size(figures["decode_weight_bytes_per_token"]),
            "batch 1, without the embedding",
        ),
        ("KV per layer and position", f"{figures['kv_bytes_per_layer_and_position']:,} B"),
        (
            f"KV cache at {context} positions",
            _size(figures["kv_cache_bytes"]),
            f"read per token; {figures['sliding_layers']} layers see a window only",
        ),
        (
            "KV cache in memory",
            _size(figures["kv_ring_bytes"]),
            f"with room to take up {costs.PREFILL_CHUNK} prompt tokens at once",
        ),
        (
            "FLOPs per decoded token",
            _flops(figures["decode_flops_per_token"]),
            f"at position {context}",
        ),
        (
            "FLOPs per trained token",
            _flops(figures["training_flops_per_token"]),
            f"mean over {context} positions",
        ),
        (
            "lane sums per token",
            str(sums),
            f"{waited} waited for, {sums - waited} delayed",
        ),
    ):
        table.add_row(*row)
    _show(table)


def _table(first: str, second: str, *more: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    table.add_column(second, justify="right", no_wrap=True)
    for title in more:
        table.add_column(title)
    return table


def _show(table: Any) -> None:
    from rich.console import Console

    Console().print(table)


def _size(count: int) -> str:
    """Decimal units, as bandwidths are given."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3f} {unit}"
    return f"{count} B"


def _flops(count: int) -> str:
    for unit, scale in (("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= scale:
            return f"{count / scale:.3f} {unit}"
    return f"{count} FLOP"
