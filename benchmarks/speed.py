"""Speed of the forward pass, a training step and decoding on this machine, each with a check.

    python benchmarks/speed.py --preset tiny --batch 4 --seq 256 --json speed.json

A row is printed only when its check passed. Times are medians; compilation is not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import decode
from laneformer_jax import Laneformer, costs, hardware
from laneformer_jax.files import atomic_file
from laneformer_jax.presets import preset
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.step import Plan, init_params, init_state, make_train_step, state_shardings

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch", type=int, default=4, help="rows of forward and training")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a row, and of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to decode, at batch 1")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()

    record = {"environment": environment(), "rows": [forward(args), training(args), decoding(args)]}
    for key, value in record["environment"].items():
        print(f"{key:<9} {value}")
    for row in record["rows"]:
        figures = ", ".join(f"{value:,.4g} {unit}" for unit, value in row["figures"].items())
        print(f"{row['name']:<14} {1e3 * row['seconds']:9.2f} ms  {figures}  [{row['check']}]")
    if args.json:
        with atomic_file(args.json) as file:
            json.dump(record, file, indent=2)


def environment() -> dict[str, str]:
    """What a figure means nothing without."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    devices = jax.devices()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores; {len(devices)}x {devices[0].device_kind}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}"]
            + [f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax")]
        ),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median wall time of `work`, whose result is waited for; it has run before."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def passed(ok: bool, what: str) -> str:
    if not ok:
        raise SystemExit(f"check failed: {what}")
    return f"checked: {what}"


def build(args: argparse.Namespace, dtype: str) -> Laneformer:
    return Laneformer(preset(args.preset), rngs=nnx.Rngs(0), dtype=dtype)


def forward(args: argparse.Namespace) -> dict[str, Any]:
    model, exact = build(args, args.dtype), build(args, "float32")
    shape = (args.batch, args.seq)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, shape).astype(np.int32)
    # What a token's logits are does not depend on the tokens after it.
    half = args.seq // 2
    difference = float(jnp.abs(exact(ids)[:, :half] - exact(ids[:, :half])).max())
    check = passed(difference <= 1e-4, "float32 logits of a prefix within 1e-4")
    jax.block_until_ready(model(ids))
    seconds = median_seconds(lambda: model(ids), args.repeats)
    return {
        "name": "forward",
        "seconds": seconds,
        "figures": {"tokens/s": args.batch * args.seq / seconds},
        "check": check,
    }


def training(args: argparse.Namespace) -> dict[str, Any]:
    config = preset(args.preset)
    plan = Plan(config, compute_dtype=args.dtype)
    params = init_params(plan, seed=0)

    def rate(count: jax.Array) -> jax.Array:
        return jnp.asarray(1e-3, jnp.float32)

    optimizer = make_optimizer(OptimizerConfig(), rate, params)
    step = make_train_step(plan, optimizer, rate, state_shardings(plan, optimizer, params))
    state = init_state(plan, optimizer, params, seed=0)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (args.batch, args.seq + 1))
    shape = (args.batch, args.seq)
    batch = {
        "tokens": ids[:, :-1].astype(np.int32),
        "targets": ids[:, 1:].astype(np.int32),
        "loss_mask": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(args.seq, dtype=np.int32), shape).copy(),
    }
    losses = []

    def one() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        return metrics

    one()
    seconds = median_seconds(one, args.repeats)
    tokens = args.batch * args.seq
    return {
        "name": "training step",
        "seconds": seconds,
        "figures": {
            "tokens/s": tokens / seconds,
            "model GFLOP/s": costs.training_flops(config, args.seq) * tokens / seconds / 1e9,
        },
        "check": passed(float(losses[-1]) < float(losses[0]), "loss falls on one batch"),
    }


def decoding(args: argparse.Namespace) -> dict[str, Any]:
    model, exact = build(args, args.dtype), build(args, "float32")
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, args.seq))

    def tokens(count: int) -> np.ndarray:
        return decode.generate(model, prompt, max_new_tokens=count).tokens

    new = decode.generate(exact, prompt, max_new_tokens=args.new).tokens
    logits = exact(np.concatenate([prompt, new], axis=1).astype(np.int32))
    again = np.asarray(jnp.argmax(logits[:, args.seq - 1 : -1], axis=-1))
    check = passed(bool((again == new).all()), "float32 tokens equal the full forward's")
    tokens(args.new)
    tokens(1)
    # The prompt's share is taken off, so that the figure is decoding alone.
    seconds = median_seconds(lambda: tokens(args.new), args.repeats)
    seconds -= median_seconds(lambda: tokens(1), args.repeats)
    per_token = seconds / (args.new - 1)
    read = costs.decode_weight_bytes(model.config, args.dtype)
    known = hardware.from_kind(jax.devices()[0].device_kind)
    return {
        "name": "decoded token",
        "seconds": per_token,
        "figures": {"tokens/s": 1 / per_token, "GB/s of weights": read / per_token / 1e9},
        "check": check,
        # For `laneformer latency --calibrate`: the device's name there, null where it has none.
        "model": args.preset,
        "hardware": known.name.lower() if known else None,
        "context": args.seq + args.new // 2,
    }


if __name__ == "__main__":
    main()
