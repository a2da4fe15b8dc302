"""Mesh axes and the one table that says along which of them each tensor is split."""

import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError

DATA, LANE = "data", "lane"
AXES = (DATA, LANE)

# Parameter path (a regular expression on the whole of it) -> how it is split. First match wins.
RULES: tuple[tuple[str, P], ...] = (
    (r"layers\.\d+\.(attention|feed_forward)\.w\w+\.weight", P(LANE)),
    (r"layers\.\d+\.attention\.[qk]_norm\.weight", P()),
    (r"(layers\.\d+\.\w+_norm|norm)\.scale", P(LANE)),
    (r"(layers\.\d+\.\w+_norm|norm)\.weight", P()),
    (r"lm_head\.linear\.weight", P(None, LANE)),
    (r"tok_embeddings\.weight", P()),
)


def parameter_spec(path: str, config: LaneformerConfig) -> P:
    """How the parameter at a dotted `path` (as in `layers.0.attention.wq.weight`) is split."""
    if path == "lm_head.weight":
        return P(LANE) if config.lm_head_type == "vocab_parallel" else P()
    for pattern, spec in RULES:
        if re.fullmatch(pattern, path):
            return spec
    raise KeyError(f"no sharding rule for parameter {path}")


def make_mesh(data: int = 1, lane: int = 1, devices: Iterable[Any] | None = None) -> Mesh:
    """A `data` × `lane` mesh. Raises UserError when there are fewer devices to hand."""
    for name, size in ((DATA, data), (LANE, lane)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UserError(f"mesh: {name} {size!r} must be a positive integer")
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < data * lane:
        raise UserError(
            f"mesh: data {data} × lane {lane} needs {data * lane} devices; {len(devices)} are available"
        )
    return jax.make_mesh(
        (data, lane), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices[: data * lane]
    )


def check_mesh(mesh: Mesh, config: LaneformerConfig) -> None:
    """Raises UserError unless `mesh` has our axes and its lane axis divides the lanes."""
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh: {mesh!r} must be a mesh of `make_mesh`, or None")
    if tuple(mesh.axis_names) != AXES:
        raise UserError(f"mesh: axes {mesh.axis_names} must be {AXES}")
    if config.num_lanes % mesh.shape[LANE]:
        raise UserError(
            f"mesh: lane axis of {mesh.shape[LANE]} must divide num_lanes {config.num_lanes}"
        )


def named(mesh: Mesh, spec: P) -> NamedSharding:
    return NamedSharding(mesh, spec)
