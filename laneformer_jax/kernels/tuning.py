"""Block sizes, warps and pipeline depths per GPU. Untuned: chosen from what compiles without spills."""

from __future__ import annotations

from dataclasses import dataclass

from laneformer_jax.kernels.backend import Launch


@dataclass(frozen=True)
class Rows:
    """A matrix-vector product: output rows of a program, and columns that it reads at once."""

    rows: int
    columns: int
    launch: Launch


@dataclass(frozen=True)
class Keys:
    """Attention: parts that the visible keys are split into, and keys that a program reads at once."""

    splits: int
    keys: int
    launch: Launch


@dataclass(frozen=True)
class Programs:
    """A whole layer in one launch: programs that are all on the GPU at once, no more than one on a
    multiprocessor, and fewer than those where a collective must run beside them."""

    count: int
    launch: Launch


@dataclass(frozen=True)
class Tuning:
    """All block sizes are upper limits: a kernel takes the largest power of two that divides the size
    at hand."""

    qkv: Rows
    attention: Keys
    out: Rows
    gate_up: Rows
    down: Rows
    norm: Rows  # `rows` are columns of the lane mean that a program makes
    head: Rows
    layer: Programs


TABLES: dict[str, Tuning] = {
    "sm_90": Tuning(
        qkv=Rows(8, 1024, Launch(warps=4)),
        attention=Keys(16, 64, Launch(warps=4, stages=2)),
        out=Rows(16, 128, Launch(warps=4)),
        gate_up=Rows(4, 1024, Launch(warps=4)),
        down=Rows(8, 512, Launch(warps=4)),
        norm=Rows(128, 1024, Launch(warps=4)),
        head=Rows(8, 1024, Launch(warps=4)),
        layer=Programs(128, Launch(warps=8)),
    ),
    "gfx942": Tuning(
        qkv=Rows(8, 1024, Launch(warps=4)),
        attention=Keys(16, 64, Launch(warps=4, stages=1)),
        out=Rows(16, 128, Launch(warps=4)),
        gate_up=Rows(4, 1024, Launch(warps=4)),
        down=Rows(8, 512, Launch(warps=4)),
        norm=Rows(128, 1024, Launch(warps=4)),
        head=Rows(8, 1024, Launch(warps=4)),
        layer=Programs(296, Launch(warps=8)),
    ),
}


def block(size: int, limit: int) -> int:
    """The largest power of two that divides `size` and does not exceed `limit`."""
    return min(size & -size, limit)
