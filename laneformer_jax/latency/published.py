"""Figures published about Laneformer's speed, beside what this model makes of the same inputs.

Inputs (node bandwidths, active bytes, measured speeds, launch counts) are published too; every `ours`
is computed from them through the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from laneformer_jax import costs
from laneformer_jax.hardware import Node, find_node
from laneformer_jax.latency.agent import generation_seconds
from laneformer_jax.latency.assumptions import engine_for
from laneformer_jax.latency.budget import simulate
from laneformer_jax.latency.workload import Workload, from_config, stream
from laneformer_jax.presets import preset

NOMINAL_PARAMETERS = 2e9  # "2B", in 16 bits
MEASURED = {"mi300xx8": 3000.0, "h200x8": 2100.0}  # tok/s of Kog's engine
UTILISATION = {"mi300xx8": 0.36, "h200x8": 0.27}  # as published beside them
GPT_OSS_BYTES = 5.1e9  # 5.1B active parameters, a byte each
DEEPSEEK_BYTES = 9.52e9  # 13B active parameters, mixed 8 and 4 bits
LAUNCHES = dict(layers=25, kernels_per_layer=10.0, launch=4.5e-6)


@dataclass(frozen=True)
class Comparison:
    """A published figure and ours. `digits`: how many of its digits were given, None for a bound."""

    name: str
    published: float
    ours: float
    digits: int | None

    @property
    def agrees(self) -> bool:
        """Within 2 %, equal when rounded as published, or on the right side of a bound."""
        if self.digits is None:
            return self.ours < self.published
        rounded = float(f"{self.ours:.{self.digits}g}")
        return rounded == self.published or abs(self.ours / self.published - 1) <= 0.02


def comparisons() -> list[Comparison]:
    """All published figures that the model can be held to."""
    mi300x, h200 = find_node("mi300xx8"), find_node("h200x8")
    nominal = stream(NOMINAL_PARAMETERS * 2)
    real = stream(costs.decode_weight_bytes(preset("laneformer-2b")))
    rows: list[tuple[str, float, float, int | None]] = [
        ("ceiling, 4 GB nominal, 8x MI300X (tok/s)", 8400, _ceiling(nominal, mi300x), 2),
        ("ceiling, 4 GB nominal, 8x H200 (tok/s)", 7700, _ceiling(nominal, h200), 2),
        ("ceiling, 4.444 GB, 8x MI300X (tok/s)", 7562, _ceiling(real, mi300x), 4),
        ("ceiling, 4.444 GB, 8x H200 (tok/s)", 6909, _ceiling(real, h200), 4),
        ("launch bound, 25 layers x 10 kernels x 4.5 us (tok/s)", 890, _launch_bound(), 2),
    ]
    for node, tokens, percent in ((mi300x, 3000, 36), (h200, 2100, 27)):
        speed, ceiling = MEASURED[node.name], _ceiling(nominal, node)
        where = f"8x {node.device.name}"
        rows += [
            (f"utilisation at {tokens} tok/s, {where} (%)", percent, 100 * speed / ceiling, 2),
            (f"speed at {percent} %, {where} (tok/s)", tokens, UTILISATION[node.name] * ceiling, 2),
        ]
    for name, size, figures in (
        ("GPT-OSS-120B class, 5.1 GB", GPT_OSS_BYTES, (2200, 2400)),
        ("DeepSeek-V4-Flash class, 9.52 GB", DEEPSEEK_BYTES, (1160, 1270)),
    ):
        for node, figure in zip((h200, mi300x), figures, strict=True):
            ours = UTILISATION["mi300xx8"] * _ceiling(stream(size), node)
            digits = 2 if size == GPT_OSS_BYTES else 3
            rows.append((f"{name} at 36 %, 8x {node.device.name} (tok/s)", figure, ours, digits))
    agent_tokens = 50_000
    rows += [
        ("50,000 tokens at 100 tok/s (minutes)", 8, generation_seconds(agent_tokens, 100) / 60, 1),
        (
            "50,000 tokens at 3,000 tok/s (s, at most)",
            20,
            generation_seconds(agent_tokens, 3000),
            None,
        ),
    ]
    return [Comparison(*row) for row in rows]


def _ceiling(workload: Workload, node: Node) -> float:
    return simulate(workload, node, engine_for(node.device, "ideal")).tokens_per_second


def _launch_bound() -> float:
    """Tokens per second when launching is all that takes time."""
    node = find_node("mi300x")
    config = preset("laneformer-2b", num_hidden_layers=LAUNCHES["layers"], swa_layers=())
    engine = replace(
        engine_for(node.device, "ideal"),
        bandwidth=float("inf"),
        flops=float("inf"),
        launch=LAUNCHES["launch"],
        kernels_per_layer=LAUNCHES["kernels_per_layer"],
    )
    return simulate(from_config(config, context=1), node, engine).tokens_per_second
