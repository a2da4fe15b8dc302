"""Where a run's time goes: seconds of updates, of waiting for data, of everything else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from laneformer_jax.hardware import from_kind

# What `Clock.lap` and `memory` tell; of two runs of the same config only these differ.
TIMED = frozenset(
    {
        "step_s",
        "tokens_per_s",
        "model_flops_per_s",
        "mfu",
        "data_wait",
        "compile_s",
        "time",
        "wall_s",
        "useful_s",
        "goodput",
        "host_memory_peak_bytes",
        "device_memory_peak_bytes",
    }
)


class Clock:
    """Time spent on updates: compiling, evaluating and saving do not count.

    Args:
        tokens, flops: of one update, over all devices.
        began: Unix seconds at which the run's first process began; None: this is it.
        useful: seconds that earlier processes spent on the updates that this one goes on from.
    """

    def __init__(self, tokens: int, flops: float, began: float | None, useful: float):
        self._tokens, self._flops = tokens, flops
        self._run_began = time.time() if began is None else began
        self._useful = useful
        self._began = time.perf_counter()
        self._updates = 0
        self._waited = 0.0

    def tick(self) -> None:
        """An update is made."""
        self._updates += 1

    def lap(self, waited: float) -> dict[str, float]:
        """The figures of the updates since the last lap, and goodput up to now.

        waited: seconds that the run has waited for data so far.

        `step_s`: of one update; `tokens_per_s`; `model_flops_per_s`, and `mfu`, its share of what the
        devices' vendors say they can do in bfloat16; `data_wait`: share of the time; `time`: Unix
        seconds; `wall_s`: since the run's first process began, whatever happened in between;
        `useful_s`: of that, seconds of updates that are part of the run, which those that a killed
        process had not saved are not; `goodput`: useful_s / wall_s.
        """
        now = time.perf_counter()
        seconds, waiting = max(now - self._began, 1e-9), waited - self._waited
        updates, self._updates = self._updates, 0
        self._began, self._waited = now, waited
        self._useful += max(seconds - waiting, 0.0)
        speed = updates * self._flops / seconds
        utilisation = mfu(speed, jax.devices()[0].device_kind, jax.device_count())
        unix = time.time()
        wall = max(unix - self._run_began, 1e-9)
        return {
            "step_s": seconds / updates,
            "tokens_per_s": updates * self._tokens / seconds,
            "model_flops_per_s": speed,
            **({} if utilisation is None else {"mfu": utilisation}),
            "data_wait": waiting / seconds,
            "time": unix,
            "wall_s": wall,
            "useful_s": self._useful,
            "goodput": self._useful / wall,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block that counts as no update's time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began


def earlier(records: list[dict[str, Any]], step: int) -> tuple[float | None, float]:
    """When a run began, and the useful seconds up to `step`, from the records of its processes.

    Those after `step` are of updates that are made again: they tell when it began, no more.
    """
    timed = [r for r in records if {"time", "wall_s", "useful_s"} <= r.keys()]
    began = min((r["time"] - r["wall_s"] for r in timed), default=None)
    return began, max((r["useful_s"] for r in timed if r["step"] <= step), default=0.0)


def mfu(flops_per_s: float, device_kind: str, devices: int) -> float | None:
    """Model FLOP/s over the dense bfloat16 peak of so many devices, by JAX's name of their kind
    (Chowdhery et al., 2022, appendix B); None for a device that `hardware` does not list."""
    device = from_kind(device_kind)
    return None if device is None else flops_per_s / (devices * device.bf16_flops)


def memory() -> dict[str, int]:
    """High-water marks of this process: `host_memory_peak_bytes`, and the largest of its devices'
    `device_memory_peak_bytes` where their backend tells (CPUs do not)."""
    stats: list[Mapping[str, int] | None] = [d.memory_stats() for d in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return _host_peak() | ({"device_memory_peak_bytes": max(peaks)} if peaks else {})


def _host_peak() -> dict[str, int]:
    try:
        import resource
    except ImportError:  # Windows
        return {}
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return {"host_memory_peak_bytes": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
