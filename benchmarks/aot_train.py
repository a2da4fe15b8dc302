"""Delayed sums in the training step of the 2B model, as XLA compiles it for eight H200s without one.

    python benchmarks/aot_train.py --json aot_train.json

Needs the extra `cuda13`, no GPU. With a lane on each GPU: how many kernels XLA's schedule has between the
start and the end of each sum of [rows, tokens, D], and what the step takes of memory. Nothing here is a time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
_WORK = ("fusion", "custom-call", "dot", "while", "call", "sort", "scatter")
_OPERATION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?)\s([a-z][a-z\-]*)\((%?[\w.\-]*)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4096, help="of the one row")
    args = parser.parse_args()
    from laneformer_jax import settings
    from laneformer_jax.hardware import find_device
    from laneformer_jax.topology import target_config
    from train.config import RunConfig
    from train.dry_run import compile_step

    device = find_device("h200")
    if target_config(device) is None:
        raise SystemExit("aot_train: needs the CUDA plugin: pip install 'laneformer-jax[cuda13]'")
    overrides = ["train.batch_size=1", f"train.seq_len={args.tokens}"]
    overrides.append("mesh={data: 1, fsdp: 1, lane: 8}")
    if args.layers != 15:
        layers = list(range(0, args.layers, 2))
        overrides.append(f"model.overrides.num_hidden_layers={args.layers}")
        overrides.append(f"model.overrides.swa_layers={layers}")
    config = settings.load(RunConfig, settings.find_config("laneformer-2b/pretrain"), overrides)
    compiled = compile_step(config, 8, device)
    memory = compiled.executable.memory_analysis()
    text = compiled.executable.as_text()
    assert memory is not None
    assert text is not None
    git = ["git", "describe", "--always", "--dirty"]
    record: dict[str, Any] = {
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "jax": version("jax"),
        "target": "8 H200",
        "layers": args.layers,
        "tokens": args.tokens,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_s": round(compiled.seconds, 1),
        **in_flight(text, (1, args.tokens, compiled.plan.config.hidden_size)),
    }
    print(json.dumps(record, indent=2))
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


def in_flight(text: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Kernels between start and end of each sum of `shape` alone, in the order of their ends.

    0: one that the step waits for. `joined`: sums of several such arrays in one, which there should not be.
    """
    of_shape = f"[{','.join(map(str, shape))}]"
    size = 1
    for side in shape:
        size *= side
    kernels, other, joined = 0, 0, 0
    started: dict[str, tuple[int, str]] = {}
    found: dict[str, list[int]] = {"forward": [], "backward": []}
    for line in text[text.index("ENTRY") :].splitlines():
        match = _OPERATION.match(line)
        if match is None:
            continue
        name, kind, operation, operand = match.groups()
        if operation == "all-reduce-start":
            started[name] = kernels, kind
        elif operation in ("all-reduce-done", "all-reduce"):
            since, kind = started.get(operand.lstrip("%"), (kernels, kind))
            elements = [_size(sides) for sides in re.findall(r"\w+\[([\d,]+)\]", kind)]
            if of_shape in kind:
                way = "backward" if "transpose" in line else "forward"
                found[way].append(kernels - since)
            elif max(elements, default=0) >= size:
                joined += 1
            else:
                other += 1
        elif operation in _WORK:
            kernels += 1
    return {"kernels": kernels, "in_flight": found, "joined": joined, "small_sums": other}


def _size(sides: str) -> int:
    size = 1
    for side in sides.split(","):
        size *= int(side)
    return size


if __name__ == "__main__":
    main()
