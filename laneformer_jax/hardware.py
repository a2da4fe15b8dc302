"""Accelerators as data: what their vendors say they can do. Needs no JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laneformer_jax.errors import UserError, nearest


@dataclass(frozen=True)
class Device:
    """One accelerator at its vendor's peak figures; nothing measured.

    Units are bytes, bytes/s and FLOP/s, decimal prefixes. FLOP/s are dense: where a vendor prints
    figures "with sparsity" only, half of them.
    """

    name: str
    vendor: str
    memory: float
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float
    link_bandwidth: float  # to all peers in the node together, one direction
    source: str

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s of matrix products in `dtype`: "bfloat16", "float16" or "float8"."""
        return {"bfloat16": self.bf16_flops, "float16": self.bf16_flops, "float8": self.fp8_flops}[
            dtype
        ]


DEVICES: dict[str, Device] = {
    "h200": Device(
        name="H200",
        vendor="NVIDIA",
        memory=141e9,
        memory_bandwidth=4.8e12,
        bf16_flops=989.5e12,
        fp8_flops=1979e12,
        link_bandwidth=450e9,
        source="https://www.nvidia.com/en-us/data-center/h200/ (SXM)",
    ),
    "mi300x": Device(
        name="MI300X",
        vendor="AMD",
        memory=192e9,
        memory_bandwidth=5.3e12,
        bf16_flops=1307.4e12,
        fp8_flops=2614.9e12,
        link_bandwidth=7 * 64e9,
        source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
    "h100": Device(
        name="H100",
        vendor="NVIDIA",
        memory=80e9,
        memory_bandwidth=3.35e12,
        bf16_flops=989.5e12,
        fp8_flops=1979e12,
        link_bandwidth=450e9,
        source="https://www.nvidia.com/en-us/data-center/h100/ (SXM)",
    ),
    "b200": Device(
        name="B200",
        vendor="NVIDIA",
        memory=180e9,
        memory_bandwidth=8e12,
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        link_bandwidth=900e9,
        source="https://www.nvidia.com/en-us/data-center/dgx-b200/ (an eighth of the node)",
    ),
}


@dataclass(frozen=True)
class Node:
    """`count` devices of one kind, each linked to every other."""

    device: Device
    count: int

    @property
    def name(self) -> str:
        return f"{self.device.name.lower()}x{self.count}"


MOST_DEVICES = 8  # of one node


def find_device(name: str) -> Device:
    """The device called `name`, in any case. Raises UserError with the nearest right name."""
    if name.lower() not in DEVICES:
        raise UserError(
            f"hardware: {name!r} is unknown; one of {', '.join(DEVICES)}{nearest(name, DEVICES)}"
        )
    return DEVICES[name.lower()]


def find_node(name: str) -> Node:
    """The node called `name`: `h200x8` is eight H200, `h200` alone is one.

    Raises:
        UserError: an unknown device, with the nearest right name, or a count not from 1 to 8.
    """
    parts = re.fullmatch(r"(.*?)(?:x(\d+))?", name, re.DOTALL | re.IGNORECASE)
    assert parts is not None  # it matches everything
    kind, count = parts[1], int(parts[2] or 1)
    if kind.lower() not in DEVICES:
        examples = [f"{known}x{parts[2]}" if parts[2] else known for known in DEVICES]
        raise UserError(
            f"hardware: {name!r} is unknown; one of {', '.join(DEVICES)} followed by x and a "
            f"number of devices{nearest(name, examples)}"
        )
    if not 1 <= count <= MOST_DEVICES:
        raise UserError(f"hardware: {name!r} has {count} devices; a node has 1 to {MOST_DEVICES}")
    return Node(DEVICES[kind.lower()], count)


def from_kind(device_kind: str) -> Device | None:
    """The device behind JAX's `device_kind`, such as "NVIDIA H100 80GB HBM3"; None if not listed."""
    words = re.findall(r"[a-z0-9]+", device_kind.lower())
    return next((device for name, device in DEVICES.items() if name in words), None)
