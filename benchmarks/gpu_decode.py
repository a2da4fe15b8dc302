"""Decode kernels on this machine's GPU: each checked, then timed; then whole tokens; then one lane's shard.

    python benchmarks/gpu_decode.py --json gpu_decode.json          # on an H200: under 8 minutes
    python benchmarks/gpu_decode.py --tiny                          # anywhere: does the script work?

Weights and cache are random, in bfloat16, all lanes on one GPU. A row is printed only when what it times
agrees with float32. With --tiny the kernels run in the interpreter on the CPU, at sizes where a time means
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from decode.step import xla_step
from laneformer_jax import LaneformerConfig, costs
from laneformer_jax.cache import RingCache
from laneformer_jax.errors import UserError
from laneformer_jax.exchange import Lanes
from laneformer_jax.files import atomic_file
from laneformer_jax.kernels import step, tuning, whole_token
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.cases import (
    CASES,
    WORKING_SET,
    Prepared,
    Sizes,
    relative_error,
    seconds,
    to_float32,
)
from laneformer_jax.kernels.names import LAUNCHES
from laneformer_jax.kernels.step import Kernels
from laneformer_jax.model import parameter_paths
from laneformer_jax.peer import PeerProcess, add_peer_arguments
from laneformer_jax.presets import preset

# Of an all-reduce of 12 KB over 8 GPUs: a vendor's library, and what a one-shot kernel is written for.
ALL_REDUCE = (8e-6, 3e-6)
MOST_ERROR = 1.25  # of the plain path's distance from float32, in bfloat16 through all layers


@dataclass(frozen=True)
class Setup:
    """What is measured, and how often."""

    config: LaneformerConfig
    backend: Backend
    table: tuning.Tuning
    contexts: tuple[int, ...]
    tokens: int  # of one timed loop
    repeats: int
    working_set: float
    copy_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="small, in the interpreter, on any device"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    add_peer_arguments(parser)
    args = parser.parse_args()
    began = time.perf_counter()
    device = jax.devices()[0]
    setup = tiny() if args.tiny else full(device)
    on_gpu = device.platform == "gpu" and not args.tiny
    record: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "measured_on_gpu": on_gpu,
    }
    print(f"{device.device_kind}, JAX {jax.__version__}")
    if not on_gpu:
        print("not run on a GPU: the times below say nothing but that the script works")
    ceiling = copy_speed(setup)
    record["copy_bytes_per_second"] = ceiling
    print(f"(a) copy {ceiling / 1e9:,.0f} GB/s, read and write counted: the ceiling below")
    print("(b) kernels")
    record["kernels"] = [
        kernel_row(setup, name, lanes, ceiling)
        for lanes in sorted({1, setup.config.num_lanes})
        for name in CASES
    ]
    print("(c) whole tokens, all lanes")
    model = whole_token.build(setup.config)
    record["tokens"] = token_rows(setup, model, ceiling)
    if not args.no_peer:
        record["tokens"] += peer_rows(setup, args.peer_python, args.tiny)
    print("(d) one lane's shard")
    record["shard"] = shard_rows(setup, model, ceiling)
    record["seconds"] = time.perf_counter() - began
    if args.json:
        with atomic_file(args.json) as file:
            file.write(json.dumps(record, indent=2) + "\n")


def full(device: Any) -> Setup:
    table = tuning.for_device(device)
    if table is None:
        sys.exit(f"gpu_decode: no kernels for {device.device_kind}; --tiny runs anywhere")
    config = preset("laneformer-2b")
    return Setup(config, Backend(), table, (128, 2048, 4000), 64, 5, WORKING_SET, 2**31)


def tiny() -> Setup:
    config = preset(
        "tiny",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        broadcast_delay=1,
        max_position_embeddings=64,
        sliding_window=16,
        swa_layers=(0,),
    )
    return Setup(config, Backend(interpret=True), tuning.INTERPRETER, (7, 40), 4, 1, 0, 2**20)


def copy_speed(setup: Setup) -> float:
    """Bytes per second, read and written, of adding 1 to a large array."""
    x = jnp.zeros((setup.copy_bytes // 4,), jnp.int32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds(lambda: add(x), setup.repeats)


def kernel_row(setup: Setup, name: str, lanes: int, ceiling: float) -> dict[str, Any]:
    """One kernel over repetitions with weights of their own, so that no cache helps."""
    sizes = Sizes(setup.config, lanes, max(setup.contexts))
    prepared = Prepared(name, sizes, setup.working_set)
    got = prepared.measure(setup.backend, setup.table, setup.repeats)
    share = got.bytes / got.seconds / ceiling
    print(
        f"{name:<14} {lanes} lanes  {1e6 * got.seconds:9.1f} µs  "
        f"{got.bytes / got.seconds / 1e9:7,.0f} GB/s  {share:4.0%}  [error {got.error:.1e}]",
        flush=True,
    )
    return {"kernel": name, "lanes": lanes, **got._asdict(), "of_ceiling": share}


def xla(setup: Setup, graph: Any) -> whole_token.One:
    """The plain path, on the kernels' cache: the same elements in the same order."""
    lanes = Lanes(setup.config.num_lanes)

    def one(params: Any, w_VD: Any, token: Any, position: Any, state: Any) -> Any:
        model = nnx.merge(graph, params)
        flat = [tuple(x.reshape(-1, *x.shape[2:]) for x in rings) for rings in state[:2]]
        cache = RingCache(flat[0], flat[1], position[None])
        x_LBSD, cache = xla_step(model, lanes, token[None, None], cache)
        logits_V = model.logits(x_LBSD, lanes)[0, 0]
        keys, values = (
            tuple(x.reshape(old.shape) for x, old in zip(rings, like, strict=True))
            for rings, like in zip(cache[:2], state[:2], strict=True)
        )
        token = jnp.argmax(logits_V).astype(jnp.int32)
        return logits_V, token, step.State(keys, values, state.scratch)

    return one


def ways(setup: Setup, graph: Any) -> dict[str, tuple[Kernels, whole_token.One]]:
    """By name: what the state is made for, and the step."""
    by_launches = {name: Kernels(setup.backend, setup.table, name) for name in LAUNCHES}
    num_lanes = setup.config.num_lanes
    return {"xla": (by_launches["fused"], xla(setup, graph))} | {
        name: (kernels, whole_token.by_kernels(kernels, graph, num_lanes))
        for name, kernels in by_launches.items()
    }


def timed_ways(
    setup: Setup, graph: Any, params: Any, w_VD: Any, lanes: int, context: int, room: int
) -> Iterator[tuple[str, float, float]]:
    """By name of the way: its error and, once that is checked, its seconds per token.

    Whole tokens in one launch only with all lanes: other devices cannot be heard inside it.
    """
    exact, plain_error = None, 0.0
    for name, (kernels, one) in ways(setup, graph).items():
        if name == "token" and lanes < setup.config.num_lanes:
            continue
        state = whole_token.random_state(kernels, setup.config, lanes, room)
        if exact is None:
            exact = exactly(one, params, w_VD, context, state)
        error = distance(one, params, w_VD, context, state, exact)
        plain_error = allowed(name, error, plain_error)
        counts = (setup.tokens, setup.repeats)
        yield (
            name,
            error,
            whole_token.seconds_per_token(one, params, w_VD, context, state, *counts),
        )


def token_rows(setup: Setup, model: Any, ceiling: float) -> list[dict[str, Any]]:
    """All lanes on this device, by context and kernels."""
    config, rows = setup.config, []
    room = max(setup.contexts) + setup.tokens + 1
    for context in setup.contexts:
        size = costs.decode_weight_bytes(config) + costs.kv_cache_bytes(config, context)
        for name, error, took in timed_ways(setup, *model, config.num_lanes, context, room):
            share = size / took / ceiling
            rows.append(
                dict(kernels=name, context=context, error=error, seconds=took, of_ceiling=share)
            )
            print(
                f"{name:<6} context {context:5}  {1e3 * took:8.3f} ms/token  "
                f"{1 / took:8,.1f} tok/s  {share:4.0%}  [error {error:.1e}]",
                flush=True,
            )
    return rows


def shard_rows(setup: Setup, model: Any, ceiling: float) -> list[dict[str, Any]]:
    """What one of eight GPUs does for a token, without the others: one lane of every layer and its part
    of the head. Alone it is no model, but plain JAX computes the same, which is what it is checked by."""
    graph, params, w_VD = model
    config, rows = setup.config, []
    part_vD = w_VD[: config.vocab_size // config.num_lanes]
    lane = jax.tree.map(lambda x: x[:1] if x.ndim == 3 else x, params)
    parameter_paths(lane)["lm_head.weight"].set_value(part_vD)
    context = setup.contexts[len(setup.contexts) // 2]
    size = costs.decode_weight_bytes(config) + costs.kv_cache_bytes(config, context)
    waits = costs.waited_lane_sums(config) + 1  # and the exchange of the likeliest token
    room = context + setup.tokens + 1
    for name, error, took in timed_ways(setup, graph, lane, part_vD, 1, context, room):
        share = size / config.num_lanes / took / ceiling
        projected = {str(each): 1 / (took + waits * each) for each in ALL_REDUCE}
        row = dict(kernels=name, context=context, error=error, seconds=took, of_ceiling=share)
        rows.append(row | {"projected_tokens_per_second": projected})
        print(
            f"{name:<6} context {context:5}  {1e6 * took:8,.0f} µs/token  {share:4.0%}  "
            f"[error {error:.1e}]"
        )
    figures = " and ".join(f"{p:,.0f}" for p in rows[1]["projected_tokens_per_second"].values())
    latencies = " and ".join(f"{1e6 * latency:.0f}" for latency in ALL_REDUCE)
    print(
        f"PROJECTION for {config.num_lanes} devices with {rows[1]['kernels']}: {figures} tok/s with "
        f"{waits} waited-for all-reduces of {latencies} µs (assumed), the delayed ones hidden"
    )
    return rows


# Checks ------------------------------------------------------------------------------------------


def exactly(one: whole_token.One, params: Any, w_VD: Any, context: int, state: Any) -> Any:
    """A token's logits in float32."""
    params, w_VD, state = to_float32((params, w_VD, state))
    return jax.jit(one)(params, w_VD, jnp.int32(1), jnp.int32(context), state)[0]


def distance(
    one: whole_token.One, params: Any, w_VD: Any, context: int, state: Any, exact: Any
) -> float:
    """Of a token's logits from those."""
    got = jax.jit(one)(params, w_VD, jnp.int32(1), jnp.int32(context), state)[0]
    return relative_error(got, exact)


def allowed(name: str, error: float, plain_error: float) -> float:
    """The plain path's error; ends the run where kernels are much further off than it."""
    if name == "xla":
        return error
    if not error < MOST_ERROR * plain_error + 1e-3:
        sys.exit(f"gpu_decode: {name}: logits are off by {error:.1e}, by xla {plain_error:.1e}")
    return plain_error


# PyTorch -----------------------------------------------------------------------------------------


def peer_rows(setup: Setup, python: str, tiny: bool) -> list[dict[str, Any]]:
    """A dense Llama of the same shape in bfloat16 with a static cache, compiled where there is a GPU."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings"
    ).split()
    script = Path(__file__).with_name("gpu_peer.py")
    shape = {name: getattr(setup.config, name) for name in names}
    try:
        peer = PeerProcess("gpu_decode", python, script, shape)
    except UserError as error:
        print(f"no PyTorch beside it: {error}")
        return []
    what, rows = f"{peer.about['device']}, {peer.about['versions']}", []
    try:
        for context in setup.contexts:
            tokens = setup.tokens if tiny else 4 * setup.tokens
            took = peer.ask(json.dumps(dict(context=context, tokens=tokens)))["seconds"]
            rows.append(dict(kernels="torch", context=context, seconds=took, what=what))
            print(
                f"torch  context {context:5}  {1e3 * took:8.3f} ms/token  {1 / took:8,.1f} tok/s  "
                f"[{what}]",
                flush=True,
            )
    finally:
        peer.close()
    return rows


if __name__ == "__main__":
    main()
