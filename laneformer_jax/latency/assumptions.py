"""What each event of a decoded token costs: published figures where there are any, else our assumptions.

Nothing here was measured by this project; `calibrate` replaces what has been.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from laneformer_jax.errors import UserError, nearest
from laneformer_jax.hardware import Device

US = 1e-6

POSTS = "Kog's posts of May 2026 (blog.kog.ai)"
ASSUMED = "assumption"

# Bytes/s that a whole token's stream reaches on one device: an eighth of the node figures behind the
# published ceilings. The other devices get the same part of their vendor's peak, rounded.
EFFECTIVE_BANDWIDTH = {"h200": 30.7e12 / 8, "mi300x": 33.6e12 / 8}
EFFECTIVE_FRACTION = 0.8

# US dollars per GPU and hour, on demand: list prices named by public comparison pages, spring 2026.
PRICES = {"h200": 3.59, "mi300x": 1.85, "h100": 2.69, "b200": 5.98}


@dataclass(frozen=True)
class Engine:
    """Costs of one way to run the model on one kind of device; times in seconds.

    Attributes:
        name: `persistent` (the whole generation is one kernel whose phases are parted by grid
            barriers) or `kernels` (a kernel ends where a barrier would be).
        bandwidth: bytes/s that the weight stream of one device reaches while it flows.
        flops: dense FLOP/s of one device.
        link_bandwidth: bytes/s of one device to all its peers, one direction.
        launch: from one kernel's end to the next one's start.
        kernels_per_layer: launches per layer, spread evenly over its phases.
        kernels_outside: launches for the embedding and the head together.
        barrier: all compute units of one device wait for each other.
        restart: first byte after the memory stream has stood still.
        collective: one sum across devices of a few KB, wire time apart.
        in_order: whether a sum starts only when the one before it has arrived, as on one stream
            of a vendor library; else only the wire time queues up.
        sampling: from logits to the next token's id, on the device.
        prefetch_bytes: weights of the next phase that a device may read while it waits.
    """

    name: str
    bandwidth: float
    flops: float
    link_bandwidth: float
    launch: float = 0.0
    kernels_per_layer: float = 0.0
    kernels_outside: float = 0.0
    barrier: float = 0.0
    restart: float = 0.0
    collective: float = 0.0
    in_order: bool = False
    sampling: float = 0.0
    prefetch_bytes: float = 0.0


EngineName = Literal["persistent", "kernels", "ideal"]
ENGINES: tuple[EngineName, ...] = ("persistent", "kernels", "ideal")

# value, range that seems possible, where it comes from; seconds unless named otherwise
TABLE: dict[str, tuple[float, str, str]] = {
    "barrier": (0.9 * US, "0.5–7 µs", f"MI300X, from about 7 µs: {POSTS}; {ASSUMED} on others"),
    "restart": (0.5 * US, "0.4–1 µs", f"MI300X: {POSTS}; {ASSUMED} on others"),
    "launch": (4.5 * US, "1–5 µs", f"{POSTS}; about 1–2 µs inside a CUDA graph ({ASSUMED})"),
    "kernels_per_layer": (10.0, "3–17", f"the example in {POSTS}"),
    "kernels_outside": (3.0, "2–6", ASSUMED),
    "collective": (
        3.0 * US,
        "2–15 µs",
        f"target of a custom sum; vendor library about 8 µs: {POSTS}",
    ),
    "library_collective": (8.0 * US, "8–20 µs", POSTS),
    "sampling": (3.0 * US, "1–20 µs", ASSUMED),
    "prefetch_bytes": (0.0, "0–20 MB", f"{ASSUMED}: none, the cautious choice"),
}


def engine_for(device: Device, name: str = "persistent") -> Engine:
    """The assumed costs of an engine on a device. `ideal` pays for bytes and FLOPs only.

    Raises UserError for an unknown name.
    """
    if name not in ENGINES:
        raise UserError(
            f"engine: {name!r} is unknown; one of {', '.join(ENGINES)}{nearest(name, ENGINES)}"
        )
    ideal = Engine(
        name=name,
        bandwidth=EFFECTIVE_BANDWIDTH.get(
            device.name.lower(), EFFECTIVE_FRACTION * device.memory_bandwidth
        ),
        flops=device.bf16_flops,
        link_bandwidth=device.link_bandwidth,
    )
    value = {key: entry[0] for key, entry in TABLE.items()}
    if name == "persistent":
        return replace(
            ideal,
            barrier=value["barrier"],
            restart=value["restart"],
            collective=value["collective"],
            sampling=value["sampling"],
            prefetch_bytes=value["prefetch_bytes"],
        )
    if name == "kernels":
        return replace(
            ideal,
            launch=value["launch"],
            kernels_per_layer=value["kernels_per_layer"],
            kernels_outside=value["kernels_outside"],
            restart=value["restart"],
            collective=value["library_collective"],
            in_order=True,
            sampling=value["sampling"],
        )
    return ideal
