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
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from decode.step import xla_step
from laneformer_jax import Laneformer, LaneformerConfig, costs
from laneformer_jax.cache import RingCache, ring_slots
from laneformer_jax.exchange import Lanes
from laneformer_jax.files import atomic_file
from laneformer_jax.kernels import attention, choose, gate_up, head, project, qkv, step
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.tuning import TABLES, Tuning
from laneformer_jax.presets import preset

BF16 = jnp.bfloat16
WORKING_SET = 256e6  # bytes that a kernel's repetitions go through: more than any cache holds
# Of an all-reduce of 12 KB over 8 GPUs: a vendor's library, and what a one-shot kernel is written for.
ALL_REDUCE = (8e-6, 3e-6)


@dataclass(frozen=True)
class Setup:
    """What is measured, and how often."""

    config: LaneformerConfig
    backend: Backend
    tuning: Tuning
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
    args = parser.parse_args()
    began = time.perf_counter()
    device = jax.devices()[0]
    setup = tiny() if args.tiny else full(device)
    record: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "measured_on_gpu": device.platform == "gpu",
    }
    print(f"{device.device_kind}, JAX {jax.__version__}")
    if device.platform != "gpu":
        print("not run on a GPU: the times below say nothing but that the script works")
    ceiling = copy_speed(setup)
    record["copy_bytes_per_second"] = ceiling
    print(f"copy {ceiling / 1e9:,.0f} GB/s, read and write counted: the ceiling below")
    record["kernels"] = [
        kernel_row(setup, op, lanes, ceiling)
        for lanes in sorted({1, setup.config.num_lanes})
        for op in OPS
    ]
    record["tokens"] = token_rows(setup, ceiling)
    record["shard"] = shard_row(setup, ceiling)
    record["seconds"] = time.perf_counter() - began
    if args.json:
        with atomic_file(args.json) as file:
            json.dump(record, file, indent=2)


def full(device: Any) -> Setup:
    table = choose.table(device)
    if table is None:
        sys.exit(f"gpu_decode: no kernels for {device.device_kind}; --tiny runs anywhere")
    config = preset("laneformer-2b")
    return Setup(config, Backend(), TABLES[table], (128, 2048, 4000), 64, 5, WORKING_SET, 2**31)


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
    backend, tuning = Backend(interpret=True), TABLES["sm_90"]
    small = replace(tuning.attention, splits=2, keys=16)
    alone = replace(tuning.layer, count=1)  # programs that meet cannot run one after another
    tuning = replace(tuning, attention=small, layer=alone)
    return Setup(config, backend, tuning, (7, 40), 4, 1, 0, 2**20)


# Time --------------------------------------------------------------------------------------------


def seconds(setup: Setup, call: Callable[[], Any]) -> float:
    """Median time of a compiled call, until its result is there."""
    jax.block_until_ready(call())
    times = []
    for _ in range(setup.repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def copy_speed(setup: Setup) -> float:
    """Bytes per second, read and written, of adding 1 to a large array."""
    x = jnp.zeros((setup.copy_bytes // 4,), jnp.int32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds(setup, lambda: add(x))


def random(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(BF16)


def relative_error(got: Any, want: Any) -> float:
    """Root mean square of the difference over that of what is wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def to_float32(tree: Any) -> Any:
    wide = lambda x: x.astype(jnp.float32) if x.dtype == BF16 else x  # noqa: E731
    return jax.tree.map(wide, tree)


# One kernel at a time ----------------------------------------------------------------------------

KERNELS = ("xla", "fused", "layer")
# name -> (setup, lanes, seed) -> weights of one repetition, the kernel, its reference; both take the
# weights and give the array that is compared.
Op = Callable[[Setup, int, int], tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]]


def _sizes(setup: Setup) -> tuple[int, int, int, int]:
    c = setup.config
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    return c.hidden_size, heads // c.num_lanes, kv_heads // c.num_lanes, c.head_size


def _norm_qkv(setup: Setup, lanes: int, seed: int) -> Any:
    hidden, heads, kv_heads, d = _sizes(setup)
    weights = qkv.Weights(
        random(seed, hidden),
        *(
            random(seed + i, lanes, n * d, hidden, scale=hidden**-0.5)
            for i, n in enumerate((heads, kv_heads, kv_heads))
        ),
    )
    x_LD = random(seed, lanes, hidden)
    turn = jnp.linspace(0.0, 3.0, d // 2)
    angles = (jnp.cos(turn), jnp.sin(turn))
    cache = jnp.zeros((lanes, kv_heads, 16, d), BF16)
    eps, at, b = setup.config.norm_eps, jnp.int32(5), setup.backend
    return (
        (x_LD, weights),
        lambda a: qkv.qkv(b, *a, eps, angles, cache, cache, at, setup.tuning.qkv)[0],
        lambda a: qkv.reference(*a, eps, angles, *to_float32((cache, cache)), at)[0],
    )


def _attention(setup: Setup, lanes: int, seed: int) -> Any:
    _, heads, kv_heads, d = _sizes(setup)
    slots = max(setup.contexts)
    rings = [random(seed + i, lanes, kv_heads, slots, d) for i in (1, 2)]
    arguments = (random(seed, lanes, heads * d), *rings)
    at, counter = jnp.int32(slots - 1), attention.empty_counter(lanes, kv_heads)
    b, blocks = setup.backend, setup.tuning.attention
    return (
        arguments,
        lambda a: attention.attend(b, *a, at, None, counter, blocks)[0],
        lambda a: attention.reference(*a, at, None),
    )


def _projection(module: str) -> Op:
    def op(setup: Setup, lanes: int, seed: int) -> Any:
        hidden, heads, _, d = _sizes(setup)
        is_out = module == "attention_out"
        inputs = heads * d if is_out else setup.config.intermediate_size // setup.config.num_lanes
        blocks = setup.tuning.out if is_out else setup.tuning.down
        arguments = (
            random(seed, lanes, hidden),
            random(seed + 1, lanes, inputs),
            random(seed + 2, lanes, hidden, inputs, scale=inputs**-0.5),
            random(seed + 3, lanes, hidden),
        )
        b = setup.backend
        return (
            arguments,
            lambda a: project.project(b, *a[:3], Rule(1.0, Past(a[3])), module, blocks)[0],
            lambda a: project.reference(*a[:3], Rule(1.0, Past(a[3])))[0],
        )

    return op


def _gate_up(setup: Setup, lanes: int, seed: int) -> Any:
    hidden, neurons = setup.config.hidden_size, setup.config.intermediate_size
    weights = gate_up.Weights(
        random(seed, hidden),
        *(
            random(seed + i, lanes, neurons // setup.config.num_lanes, hidden, scale=hidden**-0.5)
            for i in (1, 2)
        ),
    )
    arguments = (random(seed, lanes, hidden), weights)
    eps, b = setup.config.norm_eps, setup.backend
    return (
        arguments,
        lambda a: gate_up.gate_up(b, *a, eps, setup.tuning.gate_up),
        lambda a: gate_up.reference(*a, eps),
    )


def _head(setup: Setup, lanes: int, seed: int) -> Any:
    """With one lane its eighth of the rows."""
    config = setup.config
    rows = config.vocab_size * lanes // config.num_lanes
    hidden = config.hidden_size
    arguments = (
        random(seed, hidden).astype(jnp.float32),
        random(seed + 1, rows, hidden, scale=hidden**-0.5),
    )
    n, b = config.num_lanes, setup.backend
    return (
        arguments,
        lambda a: head.logits(b, a[0], n, a[1], setup.tuning.head)[0],
        lambda a: head.logits_reference(a[0], n, a[1]),
    )


OPS: dict[str, Op] = {
    "norm_qkv": _norm_qkv,
    "attention": _attention,
    "attention_out": _projection("attention_out"),
    "norm_gate_up": _gate_up,
    "mlp_down": _projection("mlp_down"),
    "head": _head,
}


def kernel_row(setup: Setup, name: str, lanes: int, ceiling: float) -> dict[str, Any]:
    """One kernel over repetitions with weights of their own, so that no cache helps."""
    first, kernel, reference = OPS[name](setup, lanes, 0)
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    count = max(2, math.ceil(setup.working_set / size))
    sets = [first, *(OPS[name](setup, lanes, 10 * i)[0] for i in range(1, count))]
    got = jax.jit(kernel)(first)
    # Scale of one rounding of each of a few intermediate values.
    error = relative_error(got, jax.jit(reference)(to_float32(first)))
    if not error < 2**-7:
        sys.exit(f"gpu_decode: {name} with {lanes} lanes is off by {error:.2%}")
    run = jax.jit(lambda sets: [kernel(a) for a in sets])
    took = seconds(setup, lambda: run(sets)) / count
    row = {
        "kernel": name,
        "lanes": lanes,
        "error": error,
        "bytes": size,
        "seconds": took,
        "of_ceiling": size / took / ceiling,
    }
    print(
        f"{name:<14} {lanes} lanes  {1e6 * took:9.1f} µs  {size / took / 1e9:7,.0f} GB/s  "
        f"{row['of_ceiling']:4.0%}  [error {error:.1e}]"
    )
    return row


# Whole tokens ------------------------------------------------------------------------------------


def random_state(
    config: LaneformerConfig, local_lanes: int, context: int, whole_layers: Tuning | None = None
) -> step.State:
    slots = [ring_slots(config, i, context, 1) for i in range(config.num_hidden_layers)]
    empty = step.empty_state(config, tuple(slots), BF16, local_lanes, whole_layers)
    fill = lambda i, x: random(i, *x.shape)  # noqa: E731
    keys = tuple(fill(i, x) for i, x in enumerate(empty.keys))
    return empty._replace(keys=keys, values=tuple(fill(-1 - i, x) for i, x in enumerate(keys)))


def stepper(setup: Setup, kernels: str, graphdef: Any, lanes: Lanes) -> Callable[..., Any]:
    """(params, head rows, token, position, state) -> logits [V], next token, state."""
    config = setup.config

    def fused(params: Any, w_VD: Any, token: Any, position: Any, state: Any) -> Any:
        model = nnx.merge(graphdef, params)
        b, tuning = setup.backend, setup.tuning
        out, state = step.decode_step(b, tuning, model, lanes, w_VD, token, position, state)
        return out.logits_V, out.token, state

    def xla(params: Any, w_VD: Any, token: Any, position: Any, state: Any) -> Any:
        model = nnx.merge(graphdef, params)
        local_lanes, _, slots, _ = state.keys[-1].shape
        shapes = jax.eval_shape(
            lambda: RingCache.empty(config, 1, slots, 1, BF16, local_lanes)
        )  # of the same elements in the same order
        keys, values = (
            tuple(x.reshape(old.shape) for x, old in zip(rings, like, strict=True))
            for rings, like in zip(state[:2], shapes[:2], strict=True)
        )
        cache = RingCache(keys, values, position[None])
        x_LBSD, cache = xla_step(model, lanes, token[None, None], cache)
        logits_V = model.logits(x_LBSD, lanes)[0, 0]
        keys, values = (
            tuple(x.reshape(old.shape) for x, old in zip(rings, like, strict=True))
            for rings, like in zip(cache[:2], state[:2], strict=True)
        )
        token = jnp.argmax(logits_V).astype(jnp.int32)
        return logits_V, token, step.State(keys, values, state.scratch)

    return xla if kernels == "xla" else fused  # a launch per layer where the state has its scratch


def loop(setup: Setup, one: Callable[..., Any]) -> Callable[..., Any]:
    """`setup.tokens` tokens on the device, each from the one before; the state is donated."""

    def run(params: Any, w_VD: Any, position: Any, state: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            token, state = carry
            _, token, state = one(params, w_VD, token, position + i, state)
            return token, state

        return jax.lax.fori_loop(0, setup.tokens, body, (jnp.int32(1), state))

    return jax.jit(run, donate_argnums=3)


def token_rows(setup: Setup, ceiling: float) -> list[dict[str, Any]]:
    """All lanes on this GPU, by context and kernels."""
    config = setup.config
    model = Laneformer(config, rngs=nnx.Rngs(0), dtype=BF16)
    graphdef, params = nnx.split(model)
    w_VD, lanes = model.lm_head.weight[...], model.local_lanes()
    ones = {k: jax.jit(stepper(setup, k, graphdef, lanes)) for k in KERNELS}
    loops = {k: loop(setup, stepper(setup, k, graphdef, lanes)) for k in ones}
    longest = max(setup.contexts) + setup.tokens + 1
    rows = []
    for context in setup.contexts:
        position = jnp.int32(context)
        states = {
            k: random_state(
                config, config.num_lanes, longest, setup.tuning if k == "layer" else None
            )
            for k in KERNELS
        }
        inputs = (params, w_VD, jnp.int32(1), position)
        exact = ones["xla"](*to_float32((*inputs, states["xla"])))[0]
        errors = {k: relative_error(one(*inputs, states[k])[0], exact) for k, one in ones.items()}
        # Bfloat16 through all layers: the kernels may be off as far as the plain path is.
        if not max(errors.values()) < 1.25 * errors["xla"] + 1e-3:
            sys.exit(f"gpu_decode: logits are off by {errors}")
        for kernels, run in loops.items():
            box = [states[kernels]]

            def call(run: Any = run, box: Any = box, position: Any = position) -> Any:
                token, box[0] = run(params, w_VD, position, box[0])
                return token

            took = seconds(setup, call) / setup.tokens
            size = costs.decode_weight_bytes(config) + costs.kv_cache_bytes(config, context)
            rows.append(
                {
                    "kernels": kernels,
                    "context": context,
                    "error": errors[kernels],
                    "seconds": took,
                    "of_ceiling": size / took / ceiling,
                }
            )
            print(
                f"{kernels:<6} context {context:5}  {1e3 * took:8.3f} ms/token  "
                f"{1 / took:8,.1f} tok/s  {size / took / ceiling:4.0%}  "
                f"[error {errors[kernels]:.1e}]"
            )
    return rows


def shard_row(setup: Setup, ceiling: float) -> dict[str, Any]:
    """What one of eight GPUs does for a token, without the others: one lane of every layer and its part
    of the head. Checked above as one of all lanes; alone it is not a model."""
    config = setup.config
    graphdef, params = nnx.split(Laneformer(config, rngs=nnx.Rngs(0), dtype=BF16))
    lane = jax.tree.map(lambda x: x[:1] if x.ndim == 3 else x, params)
    rows = config.vocab_size // config.num_lanes
    w_VD = random(1, rows, config.hidden_size, scale=0.02)
    context = setup.contexts[len(setup.contexts) // 2]
    box = [random_state(config, 1, context + setup.tokens + 1)]
    one = stepper(setup, "fused", graphdef, Lanes(config.num_lanes))
    run = loop(setup, one)

    def call() -> Any:
        token, box[0] = run(lane, w_VD, jnp.int32(context), box[0])
        return token

    took = seconds(setup, call) / setup.tokens
    cost = costs.decode_weight_bytes(config) + costs.kv_cache_bytes(config, context)
    waits = costs.waited_lane_sums(config) + 1  # and the exchange of the likeliest token
    projected = [1 / (took + waits * latency) for latency in ALL_REDUCE]
    print(
        f"one lane's shard, context {context}: {1e6 * took:,.0f} µs/token, "
        f"{cost / config.num_lanes / took / ceiling:.0%} of the ceiling"
    )
    figures = " and ".join(f"{p:,.0f}" for p in projected)
    latencies = " and ".join(f"{1e6 * latency:.0f}" for latency in ALL_REDUCE)
    print(
        f"PROJECTION for {config.num_lanes} GPUs: {figures} tok/s with {waits} waited-for all-reduces "
        f"of {latencies} µs (assumed), the delayed ones hidden"
    )
    return {
        "context": context,
        "seconds": took,
        "of_ceiling": cost / config.num_lanes / took / ceiling,
        "projected_tokens_per_second": dict(zip(map(str, ALL_REDUCE), projected, strict=True)),
    }


if __name__ == "__main__":
    main()
