"""The decode step of the 2B model as XLA compiles it for H200s, counted without one.

    python benchmarks/aot_h200.py --json aot.json

Needs the extra `cuda13`, no GPU. For the plain JAX path and the fused kernels, on one GPU and with one
lane on each of eight: kernel launches per token by kind, bytes, all-reduces, and how many kernels
run while each all-reduce is under way. Nothing here is a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 4096


class Case(NamedTuple):
    """One program: the step of a token, or with `loop` the decode engine's loop around it."""

    kernels: str
    gpus: int
    delayed: bool = True
    loop: bool = False


CASES = [
    Case("xla", 1),
    Case("fused", 1),
    Case("layer", 1),
    Case("xla", 8),
    Case("fused", 8),
    Case("layer", 8),
    Case("fused", 8, loop=True),
    Case("layer", 8, loop=True),
    Case("xla", 8, delayed=False),
    Case("fused", 8, delayed=False),
    Case("token", 1),
]


class Launched(NamedTuple):
    """What XLA launches for a token."""

    kernels: int
    by_name: Counter[str]
    in_flight: list[
        int
    ]  # kernels launched while each all-reduce is under way, in the order they end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(count(Case(*json.loads(args.case)), args.dump)))
        return
    git = ["git", "describe", "--always", "--dirty"]
    record: dict[str, Any] = {
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "jax": version("jax"),
        "target": "H200",
        "context": CONTEXT,
        "rows": [],
    }
    for case in CASES:
        record["rows"].append(run(case))
        print_row(record["rows"][-1])
        if args.json:
            args.json.write_text(json.dumps(record, indent=2) + "\n")


def run(case: Case) -> dict[str, Any]:
    """One case in a process of its own: XLA reads its flags once."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_gpu_autotune_level=0"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        out = subprocess.run(
            [sys.executable, __file__, "--dump", dump, "--case", json.dumps(case)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    row: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return row


def print_row(row: dict[str, Any]) -> None:
    kinds = ", ".join(f"{n} {kind}" for kind, n in row["launches"].items())
    rules = "delayed" if row["delayed"] else "undelayed"
    what = ", in the engine's loop" if row["loop"] else ""
    print(f"{row['kernels']} on {row['gpus']}, {rules}{what}:", flush=True)
    print(f"  {row['kernel_launches']} kernels per token ({kinds})")
    print(f"  {row['argument_bytes']:,} bytes of arguments, {row['temp_bytes']:,} of temporaries")
    if row["gpus"] > 1:
        print(f"  {row['all_reduces']} all-reduces; kernels while under way: {row['in_flight']}")


# In the process of a case ------------------------------------------------------------------------


def count(case: Case, dump: Path) -> dict[str, Any]:
    """Compile one case and read what XLA wrote about it."""
    from aot_programs import compile_loop, compile_step

    from laneformer_jax.presets import preset

    config = preset("laneformer-2b")
    if not case.delayed:  # δ ≥ N with early communication: as in ordinary tensor parallelism
        undelayed = dict(broadcast_delay=config.num_hidden_layers, use_early_comm=True)
        config = preset("laneformer-2b", **undelayed)
    compile_case = compile_loop if case.loop else compile_step
    compiled = compile_case(config, case.kernels, case.gpus, CONTEXT)
    memory = compiled.memory_analysis()
    name = "burst" if case.loop else "token_step"
    [sequence] = dump.glob(f"*{name}*thunk_sequence.txt")
    launched = read(sequence.read_text())
    return {
        **case._asdict(),
        "kernel_launches": launched.kernels,
        "launches": dict(launched.by_name.most_common()),
        "all_reduces": len(launched.in_flight),
        "in_flight": launched.in_flight,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


KERNELS = ("kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul", "kCopy", "kMemzero")
REDUCES = ("kAllReduce", "kCollectiveKernel")


def read(sequence: str) -> Launched:
    """XLA's list of what it launches, or the body of its loop where there is one."""
    names: Counter[str] = Counter()
    kernels, in_flight = 0, []
    started: dict[str, int] = {}
    inside = False  # an asynchronous launch, which its all-reduce follows
    for line in _of_a_token(sequence.splitlines()):
        kind = re.search(r"\b(k[A-Z]\w+)", line)
        if kind is None:
            continue
        if kind[1] in KERNELS:
            kernels += 1
            name = re.search(r"\] (?:kernel=)?([^\s,]+)", line)
            assert name is not None, line
            names["copy" if kind[1] == "kCopy" else re.sub(r"[_.\d]+$", "", name[1])] += 1
        elif kind[1] in REDUCES and not inside:
            in_flight.append(0)
        token = re.search(r"async_id=(\d+)", line)
        inside = token is not None and kind[1] == "kAsyncStart"
        if token and kind[1] == "kAsyncStart":
            started[token[1]] = kernels
        elif token and kind[1] == "kAsyncDone":
            in_flight.append(kernels - started[token[1]])
    return Launched(kernels, names, in_flight)


def _of_a_token(lines: list[str]) -> list[str]:
    """The lines below "body:", which stand further to the right; all where there is no loop."""
    for i, line in enumerate(lines):
        if line.strip() == "body:":
            depth, body = line.index("body:"), lines[i + 1 :]
            ends = (j for j, x in enumerate(body) if x[: depth + 1].strip())
            return body[: next(ends, len(body))]
    return lines


if __name__ == "__main__":
    main()
