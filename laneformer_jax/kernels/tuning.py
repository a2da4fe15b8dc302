"""Block sizes, warps and pipeline depths of the kernels, as data: a table per kind of GPU.

`tables/*.yaml` are shipped, chosen from what compiles; `laneformer tune` measures on a GPU and writes one
for it, which then comes first. Imports no Pallas.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from laneformer_jax import settings
from laneformer_jax.errors import UserError

SHIPPED = ("sm_90", "gfx942")
SPARE = 4  # multiprocessors that whole layers leave to others, such as a collective


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value}: must be at least 1")


def _power_of_two(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} = {value}: must be a power of two")


@dataclass(frozen=True)
class Launch:
    """How many warps of 32 (AMD: 64) threads a program has, and the depth of its load pipelines."""

    warps: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        _power_of_two("warps", self.warps)
        _at_least_1("stages", self.stages)


@dataclass(frozen=True)
class Rows:
    """A matrix-vector product: output rows of a program, and columns that it reads at once."""

    rows: int
    columns: int
    launch: Launch = Launch()

    def __post_init__(self) -> None:
        _power_of_two("rows", self.rows)
        _power_of_two("columns", self.columns)


@dataclass(frozen=True)
class Keys:
    """Attention: parts that the visible keys are split into, and keys that a program reads at once."""

    splits: int
    keys: int
    launch: Launch = Launch()

    def __post_init__(self) -> None:
        _at_least_1("splits", self.splits)
        _power_of_two("keys", self.keys)


@dataclass(frozen=True)
class Programs:
    """Whole layers in one launch: programs that are all on the GPU at once, no more than one on a
    multiprocessor, and fewer than those where a collective must run beside them."""

    count: int
    launch: Launch = Launch()

    def __post_init__(self) -> None:
        _at_least_1("count", self.count)


@dataclass(frozen=True)
class Tuning:
    """All block sizes are upper limits: a kernel takes the largest power of two that divides the size
    at hand. auto: what `--kernels auto` runs; `token` only where all lanes are on one GPU."""

    qkv: Rows
    attention: Keys
    out: Rows
    gate_up: Rows
    down: Rows
    norm: Rows  # `rows` are columns of the lane mean that a program makes
    head: Rows
    layer: Programs
    auto: Literal["fused", "layer", "token"] = "fused"


# For the interpreter, where only one program can meet.
INTERPRETER = Tuning(
    qkv=Rows(16, 64),
    attention=Keys(2, 16),
    out=Rows(16, 64),
    gate_up=Rows(16, 64),
    down=Rows(16, 64),
    norm=Rows(64, 64),
    head=Rows(16, 64),
    layer=Programs(1),
)


@cache
def shipped(name: str) -> Tuning:
    """One of `SHIPPED`."""
    return settings.load(Tuning, Path(__file__).parent / "tables" / f"{name}.yaml")


def family(device: Any) -> str | None:
    """Of `SHIPPED`, the one for a JAX device; None where the kernels cannot run."""
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu":
        return None
    if capability.startswith("gfx"):
        return "gfx942" if capability.startswith("gfx942") else None
    return "sm_90" if float(capability or 0) >= 8 else None


def tuned_path(device: Any) -> Path:
    """Where `laneformer tune` puts the table of a kind of GPU: in the user's folder for caches."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return base / "laneformer" / "tuning" / f"{name}.yaml"


def for_device(device: Any) -> Tuning | None:
    """The table of a JAX device: what was tuned for its kind, else what is shipped for its family.

    Programs that wait for each other must all be on the GPU at once. A smaller one of a family, such as an
    A100 or an MI300A, gets as many of them as it has multiprocessors, less `SPARE`.

    Raises:
        UserError: a tuned table that is not one, or has more programs than multiprocessors.
    """
    name = family(device)
    if name is None:
        return None
    tuned = tuned_path(device)
    processors = int(device.core_count)
    if not tuned.exists():
        table = shipped(name)
        count = min(table.layer.count, max(1, processors - SPARE))
        return replace(table, layer=replace(table.layer, count=count))
    table = settings.load(Tuning, tuned)
    if table.layer.count > processors:
        raise UserError(
            f"{tuned}: layer.count: {table.layer.count} programs that wait for each other must be at"
            f" most the {processors} multiprocessors of this {device.device_kind}"
        )
    return table


def block(size: int, limit: int) -> int:
    """The largest power of two that divides `size` and does not exceed `limit`."""
    return min(size & -size, limit)
