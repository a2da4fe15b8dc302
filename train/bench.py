"""Speed of a training step on this machine: 8 lanes, 1 lane, and a dense PyTorch model of the same size.

The three take turns within one run, so that a slow minute slows all of them. The peer is a process of
its own (`train.bench_peer`), with --peer-python under another interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laneformer_jax.peer import PeerProcess, add_peer_arguments

# 42M parameters; lanes do not change their number.
SHAPE: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=512,
)
BATCH, SEQ = 4, 512
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of malloc.h


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `laneformer bench train`."""
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, of which the median")
    add_peer_arguments(parser)
    parser.add_argument("--json", action="store_true", help="end with all figures as a JSON line")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed instead of giving it back to the system; elsewhere nothing.

    A step frees gigabytes and asks for them again: without this the system clears them every time.
    Both sides of the comparison do it.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_ARENA_MAX, 1)  # threads' own arenas ask the system for every large block


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0."""
    keep_freed_memory()
    figures = measure(args.rounds, None if args.no_peer else args.peer_python)
    for name, value in figures.items():
        print(f"{name:<26} {value:,.4g}" if isinstance(value, float) else f"{name:<26} {value}")
    if args.json:
        print(json.dumps(figures))
    return 0


def measure(rounds: int, peer_python: str | None) -> dict[str, Any]:
    """Medians over `rounds` steps of each, after two that are not counted.

    Raises:
        UserError: the peer cannot start.
    """
    from laneformer_jax import costs
    from laneformer_jax.config import LaneformerConfig

    config = LaneformerConfig(**SHAPE)  # 8 lanes, δ = 2
    eight, one = Step(config), Step(LaneformerConfig(**SHAPE, num_lanes=1))
    steps: dict[str, Callable[[], float]] = {"eight": eight, "one": one}
    peer = None if peer_python is None else Peer(peer_python)
    if peer is not None:
        steps["peer"] = peer
    try:
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds + 2):
            for name, step in steps.items():
                seconds[name].append(step())
    finally:
        if peer is not None:
            peer.close()
    median = {name: statistics.median(times[2:]) for name, times in seconds.items()}
    tokens = BATCH * SEQ
    flops = costs.training_flops(config, SEQ) * tokens
    figures: dict[str, Any] = {
        "tokens_per_s": tokens / median["eight"],
        "lanes1_tokens_per_s": tokens / median["one"],
        "lanes8_over_lanes1_time": median["eight"] / median["one"],
        "model_gflops_per_s": flops / median["eight"] / 1e9,
        "parameters": config.num_parameters(),
        "compile_s": eight.compile_s,
        "loss_first": eight.losses[0],
        "loss_last": eight.losses[-1],
    }
    if peer is not None:
        figures["peer_tokens_per_s"] = tokens / median["peer"]
        figures["ratio_to_peer"] = median["peer"] / median["eight"]
        figures["peer_versions"] = peer.versions
    import jax

    return figures | {"jax_version": jax.__version__, "python": sys.version.split()[0]}


class Step:
    """Our update on one batch of random tokens; a call makes one and returns its seconds."""

    def __init__(self, config: Any):
        import jax
        import jax.numpy as jnp
        import numpy as np

        from train.config import OptimizerConfig
        from train.optimizer import make_optimizer
        from train.step import Plan, init_params, init_state, make_train_step, state_shardings

        plan = Plan(config)
        params = init_params(plan, seed=0)

        def rate(count: jax.Array) -> jax.Array:
            return jnp.asarray(1e-3, jnp.float32)

        optimizer = make_optimizer(OptimizerConfig(), rate, params)
        step = make_train_step(plan, optimizer, rate, state_shardings(plan, optimizer, params))
        self._state = init_state(plan, optimizer, params, seed=0)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, SEQ + 1))
        tokens = tokens.astype(np.int32)
        shape = (BATCH, SEQ)
        self._batch = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_mask": np.ones(shape, np.float32),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(SEQ, dtype=np.int32), shape).copy(),
        }
        began = time.perf_counter()
        self._step = step.lower(self._state, self._batch).compile()  # type: ignore[attr-defined]
        self.compile_s = time.perf_counter() - began
        self.losses: list[float] = []

    def __call__(self) -> float:
        began = time.perf_counter()
        self._state, metrics = self._step(self._state, self._batch)
        self.losses.append(float(metrics["loss"]))
        return time.perf_counter() - began


class Peer(PeerProcess):
    """The process with the PyTorch model; a call has it make one update and returns its seconds."""

    def __init__(self, python: str):
        script = Path(__file__).with_name("bench_peer.py")
        super().__init__("train", python, script, SHAPE | dict(batch=BATCH, seq=SEQ))
        self.versions = self.about["versions"]

    def __call__(self) -> float:
        return float(self.ask("step")["seconds"])
