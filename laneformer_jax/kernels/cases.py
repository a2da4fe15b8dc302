"""Inputs at a model's sizes for each operation, to check a kernel against its reference and to time it.

Weights and cache are random, in bfloat16; L lanes on one device.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.kernels import attention, gate_up, head, project, qkv
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.tuning import Tuning

BF16 = jnp.bfloat16
# Of the root mean square: the scale of one rounding of each of a few intermediate values.
MOST_ERROR = 2**-7
WORKING_SET = 256e6  # bytes that a kernel's repetitions go through: more than any cache holds


class Case(NamedTuple):
    """Arguments, and functions of them whose results are compared; the kernel's is given its backend
    and tuning first."""

    arguments: Any
    kernel: Callable[[Backend, Tuning, Any], jax.Array]
    reference: Callable[[Any], jax.Array]


class Measured(NamedTuple):
    """Of one kernel: error against float32, bytes that it reads, and seconds of a launch."""

    error: float
    bytes: int
    seconds: float


class Sizes(NamedTuple):
    """Of one lane's operations, and how many tokens its attention sees."""

    config: LaneformerConfig
    lanes: int
    context: int

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads // self.config.num_lanes

    @property
    def kv_heads(self) -> int:
        return self.config.num_key_value_heads // self.config.num_lanes

    @property
    def neurons(self) -> int:
        return self.config.intermediate_size // self.config.num_lanes


def _norm_qkv(s: Sizes, seed: int) -> Case:
    hidden, d = s.config.hidden_size, s.config.head_size
    counts = (s.heads, s.kv_heads, s.kv_heads)
    matrices = [
        random(seed + i, s.lanes, n * d, hidden, scale=hidden**-0.5) for i, n in enumerate(counts)
    ]
    weights = qkv.Weights(random(seed, hidden), *matrices)
    turn = jnp.linspace(0.0, 3.0, d // 2)
    angles = (jnp.cos(turn), jnp.sin(turn))
    cache = jnp.zeros((s.lanes, s.kv_heads, 16, d), BF16)
    wide = cache.astype(jnp.float32)
    eps, at = s.config.norm_eps, jnp.int32(5)
    return Case(
        (random(seed, s.lanes, hidden), weights),
        lambda b, t, a: qkv.qkv(b, a[0], a[1], eps, angles, cache, cache, at, t.qkv)[0],
        lambda a: qkv.reference(a[0], a[1], eps, angles, wide, wide, at)[0],
    )


def _attention(s: Sizes, seed: int) -> Case:
    d = s.config.head_size
    rings = [random(seed + i, s.lanes, s.kv_heads, s.context, d) for i in (1, 2)]
    at, counter = jnp.int32(s.context - 1), attention.empty_counter(s.lanes, s.kv_heads)
    return Case(
        (random(seed, s.lanes, s.heads * d), *rings),
        lambda b, t, a: attention.attend(b, a[0], a[1], a[2], at, None, counter, t.attention)[0],
        lambda a: attention.reference(a[0], a[1], a[2], at, None),
    )


def _projection(module: str) -> Callable[[Sizes, int], Case]:
    def case(s: Sizes, seed: int) -> Case:
        is_out, hidden = module == "attention_out", s.config.hidden_size
        inputs = s.heads * s.config.head_size if is_out else s.neurons
        arguments = (
            random(seed, s.lanes, hidden),
            random(seed + 1, s.lanes, inputs),
            random(seed + 2, s.lanes, hidden, inputs, scale=inputs**-0.5),
            random(seed + 3, s.lanes, hidden),
        )

        def kernel(b: Backend, t: Tuning, a: Any) -> jax.Array:
            blocks = t.out if is_out else t.down
            x_LD, a_LI, w_LDI, past_LD = a
            rule = Rule(1.0, Past(past_LD))
            return project.project(b, x_LD, a_LI, w_LDI, rule, module, blocks)[0]

        def reference(a: Any) -> jax.Array:
            x_LD, a_LI, w_LDI, past_LD = a
            return project.reference(x_LD, a_LI, w_LDI, Rule(1.0, Past(past_LD)))[0]

        return Case(arguments, kernel, reference)

    return case


def _gate_up(s: Sizes, seed: int) -> Case:
    hidden, eps = s.config.hidden_size, s.config.norm_eps
    matrices = [random(seed + i, s.lanes, s.neurons, hidden, scale=hidden**-0.5) for i in (1, 2)]
    return Case(
        (random(seed, s.lanes, hidden), gate_up.Weights(random(seed, hidden), *matrices)),
        lambda b, t, a: gate_up.gate_up(b, a[0], a[1], eps, t.gate_up),
        lambda a: gate_up.reference(a[0], a[1], eps),
    )


def _head(s: Sizes, seed: int) -> Case:
    """With fewer lanes their part of the rows."""
    n, hidden = s.config.num_lanes, s.config.hidden_size
    rows = s.config.vocab_size * s.lanes // n
    arguments = (
        random(seed, hidden).astype(jnp.float32),
        random(seed + 1, rows, hidden, scale=hidden**-0.5),
    )
    first = jnp.int32(0)
    return Case(
        arguments,
        lambda b, t, a: head.logits(b, a[0], n, a[1], t.head, first, rows)[0],
        lambda a: head.logits_reference(a[0], n, a[1]),
    )


# By the name of the launch; and the field of `Tuning` that it is tuned by.
CASES: dict[str, tuple[Callable[[Sizes, int], Case], str]] = {
    "norm_qkv": (_norm_qkv, "qkv"),
    "attention": (_attention, "attention"),
    "attention_out": (_projection("attention_out"), "out"),
    "norm_gate_up": (_gate_up, "gate_up"),
    "mlp_down": (_projection("mlp_down"), "down"),
    "head": (_head, "head"),
}


class Prepared:
    """One operation's case with as many sets of weights as no cache holds, and its exact result."""

    def __init__(self, name: str, sizes: Sizes, working_set: float = WORKING_SET):
        make = CASES[name][0]
        self.name, self.case = name, make(sizes, 0)
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(self.case.arguments))
        count = max(2, math.ceil(working_set / self.bytes))
        others = (make(sizes, 10 * i).arguments for i in range(1, count))
        self.sets = [self.case.arguments, *others]
        self.exact = jax.jit(self.case.reference)(to_float32(self.case.arguments))

    def measure(self, b: Backend, t: Tuning, repeats: int) -> Measured:
        """Checked, then timed.

        Raises:
            UserError: the kernel's result is further from float32 than `MOST_ERROR`.
        """

        def kernel(arguments: Any) -> jax.Array:
            return self.case.kernel(b, t, arguments)

        error = relative_error(jax.jit(kernel)(self.case.arguments), self.exact)
        if not error < MOST_ERROR:
            raise UserError(f"{self.name}: the kernel is off by {error:.2%}; nothing is timed")
        run = jax.jit(lambda sets: [kernel(a) for a in sets])
        took = seconds(lambda: run(self.sets), repeats) / len(self.sets)
        return Measured(error, self.bytes, took)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a compiled call, until its result is there."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def random(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(BF16)


def relative_error(got: Any, want: Any) -> float:
    """Root mean square of the difference over that of what is wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == BF16 else x, tree)
