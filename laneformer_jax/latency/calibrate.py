"""Replace assumed costs by measured ones.

A calibration file is JSON: `parameters`, fields of `Engine` in seconds and bytes/s that were measured
by themselves, and `measurements`, whole tokens timed on the hardware in question:

    {"parameters": {"collective": 5.1e-6},
     "measurements": [{"model": "laneformer-2b", "hardware": "h200x8", "context": 1024,
                       "tokens_per_second": 1850}]}

The record that `benchmarks/speed.py --json` writes on a known GPU is taken as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from laneformer_jax.errors import UserError, nearest
from laneformer_jax.files import read_json
from laneformer_jax.hardware import Node, find_node
from laneformer_jax.latency.assumptions import Engine
from laneformer_jax.latency.budget import simulate
from laneformer_jax.latency.models import find_workload

# The two speeds published for Kog's engine, at a context that was not published.
PUBLISHED = Path(__file__).with_name("published_speeds.json")


@dataclass(frozen=True)
class Measurement:
    """A decode speed at batch one; `scheme` as in `schedule.SCHEMES`."""

    model: str
    hardware: str
    tokens_per_second: float
    context: int = 1024
    scheme: str = "delayed"
    note: str = ""

    def __post_init__(self) -> None:
        if not self.tokens_per_second > 0:
            raise UserError(f"tokens_per_second: {self.tokens_per_second} must be above 0")


@dataclass(frozen=True)
class Calibration:
    parameters: dict[str, float] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)


def read(path: Path) -> Calibration:
    """A calibration file, or a record of `benchmarks/speed.py`. Raises UserError."""
    from laneformer_jax import settings

    data = read_json(path)
    if isinstance(data, dict) and "rows" in data:
        data = {"measurements": [_from_row(row) for row in data["rows"] if row.get("hardware")]}
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold a JSON object")
    calibration = settings.from_dict(Calibration, data, str(path))
    names = [f.name for f in fields(Engine) if f.name not in ("name", "in_order")]
    for name, value in calibration.parameters.items():
        if name not in names:
            hint = nearest(name, names) or f"; allowed: {', '.join(names)}"
            raise UserError(f"{path}: parameters.{name}: unknown{hint}")
        check_parameter(name, value, f"{path}: parameters.")
    if not calibration.parameters and not calibration.measurements:
        raise UserError(f"{path}: holds neither parameters nor measurements on known hardware")
    return calibration


def check_parameter(name: str, value: float, where: str = "") -> None:
    """Raise UserError unless the value is possible for the Engine field `name`."""
    rate = name in ("bandwidth", "flops", "link_bandwidth")
    if not (value > 0 if rate else 0 <= value < float("inf")):
        raise UserError(f"{where}{name}: {value} must be {'above' if rate else 'at least'} 0")


def apply(calibration: Calibration, engine: Engine, node: Node) -> Engine:
    """The engine with measured costs.

    Parameters are taken as they are. Measurements on devices of the node's kind then set the cost
    per phase (`launch` with launches, else `barrier`) so that the simulated tokens take as long as
    the measured ones; two or more also set the bandwidth, by least squares of relative errors.

    Raises:
        UserError: measurements of other hardware only, or a speed beyond the vendor's bandwidth.
    """
    engine = replace(engine, **calibration.parameters)  # type: ignore[arg-type]
    if not calibration.measurements:
        return engine
    ours = [m for m in calibration.measurements if find_node(m.hardware).device is node.device]
    if not ours:
        other = ", ".join(sorted({m.hardware for m in calibration.measurements}))
        raise UserError(f"calibrate: measured on {other}, not on {node.device.name.lower()}")
    overhead = "launch" if engine.launch else "barrier"
    if len(ours) == 1:
        return _fit_one(ours[0], engine, node, overhead)
    from scipy.optimize import least_squares

    peak = node.device.memory_bandwidth

    def build(x: Any) -> Engine:
        return replace(engine, bandwidth=x[0] * peak, **{overhead: x[1] * 1e-6})

    def errors(x: Any) -> list[float]:
        return [_seconds(m, build(x)) * m.tokens_per_second - 1 for m in ours]

    start = [engine.bandwidth / peak, max(getattr(engine, overhead) * 1e6, 0.1)]
    found = least_squares(errors, start, bounds=([0.01, 0.0], [1.0, 1000.0]), x_scale=[0.1, 1.0])
    return build(found.x)


def _fit_one(measured: Measurement, engine: Engine, node: Node, overhead: str) -> Engine:
    from scipy.optimize import brentq

    target = 1 / measured.tokens_per_second

    def with_overhead(seconds: float) -> Engine:
        return replace(engine, **{overhead: seconds})  # type: ignore[arg-type]

    if _seconds(measured, with_overhead(0.0)) <= target:
        seconds = brentq(lambda s: _seconds(measured, with_overhead(s)) - target, 0.0, target)
        return with_overhead(float(seconds))
    peak = node.device.memory_bandwidth

    def with_bandwidth(value: float) -> Engine:
        return replace(with_overhead(0.0), bandwidth=value)

    if _seconds(measured, with_bandwidth(peak)) > target:
        raise UserError(
            f"calibrate: {measured.tokens_per_second:g} tok/s of {measured.model} on "
            f"{measured.hardware} is faster than its memory allows"
        )
    return with_bandwidth(
        float(brentq(lambda b: _seconds(measured, with_bandwidth(b)) - target, 0.01 * peak, peak))
    )


def _seconds(measured: Measurement, engine: Engine) -> float:
    workload = find_workload(measured.model, measured.context)
    return simulate(workload, find_node(measured.hardware), engine, measured.scheme).seconds


def _from_row(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("model", "hardware", "context")
    return {**{key: row[key] for key in keys}, "tokens_per_second": 1 / row["seconds"]}
