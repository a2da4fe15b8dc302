"""Mesh axes and the one table that says along which of them each tensor is split.

`data` and `fsdp` share the rows of a batch, `lane` the lanes. Parameters, their gradients and the
optimizer's state are split over `fsdp` and `lane`; `data` repeats them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError, nearest

DATA, FSDP, LANE = "data", "fsdp", "lane"
AXES = (DATA, FSDP, LANE)
ROWS = (DATA, FSDP)  # rows of a batch


class Rule(NamedTuple):
    """How the parameters of one role are split.

    Attributes:
        role: what errors call it.
        path: a regular expression on the whole dotted path.
        serve: in a forward pass or a decode; whole but for lanes.
        train: where its elements rest in training. An axis that does not divide its dimension is
            left out: the tensor is repeated along it.
        gather: axes of `train` that are undone before the tensor is used.
    """

    role: str
    path: str
    serve: P
    train: P
    gather: tuple[str, ...] = (FSDP,)


_LAYER = r"layers\.\d+\."
# First match wins. Hidden size, which every large tensor has, is what `fsdp` splits.
RULES: tuple[Rule, ...] = (
    Rule(
        "linear into lanes",
        _LAYER + r"(attention\.w[qkv]|feed_forward\.w[13])\.weight",
        P(LANE),
        P(LANE, None, FSDP),
    ),
    Rule(
        "linear out of lanes",
        _LAYER + r"(attention\.wo|feed_forward\.w2)\.weight",
        P(LANE),
        P(LANE, FSDP),
    ),
    Rule("query and key norm", _LAYER + r"attention\.[qk]_norm\.weight", P(), P()),
    Rule("norm of each lane", rf"({_LAYER}\w+_norm|norm)\.scale", P(LANE), P(LANE)),
    Rule("norm", rf"({_LAYER}\w+_norm|norm)\.weight", P(), P()),
    Rule("head, lane", r"lm_head\.linear\.weight", P(None, LANE), P(FSDP, LANE)),
    Rule("head, vocab_parallel", r"lm_head\.weight:LVD", P(LANE), P(LANE, None, FSDP)),
    # In training each lane device makes the logits of its part of the vocabulary.
    Rule("head, replicate", r"lm_head\.weight:VD", P(), P(LANE, FSDP)),
    Rule("embedding", r"tok_embeddings\.weight", P(), P(LANE, FSDP), gather=(FSDP, LANE)),
)


def rule_of(path: str, config: LaneformerConfig, rules: Sequence[Rule] = RULES) -> Rule:
    """The rule for the parameter at a dotted `path` (as in `layers.0.attention.wq.weight`)."""
    if path == "lm_head.weight":  # two roles share this name
        path += ":LVD" if config.lm_head_type == "vocab_parallel" else ":VD"
    for rule in rules:
        if re.fullmatch(rule.path, path):
            return rule
    raise KeyError(f"no sharding rule for parameter {path}")


def parameter_spec(path: str, config: LaneformerConfig) -> P:
    """How the parameter at a dotted `path` is split in a forward pass or a decode."""
    return rule_of(path, config).serve


def training_spec(path: str, shape: Sequence[int], config: LaneformerConfig, mesh: Mesh) -> P:
    """How the parameter at a dotted `path`, its gradient and optimizer state rest in training."""
    sizes = dict(mesh.shape)
    entries = [
        axis if axis is not None and sizes[axis] > 1 and shape[i] % sizes[axis] == 0 else None
        for i, axis in enumerate(rule_of(path, config).train)
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def check_rules(rules: Sequence[Rule] = RULES, axes: Sequence[str] = AXES) -> None:
    """Raises UserError unless every axis that `rules` name exists and splits one dimension only."""
    for rule in rules:
        for column in ("serve", "train"):
            seen: dict[str, int] = {}
            for dimension, entry in enumerate(getattr(rule, column)):
                for axis in entry if isinstance(entry, tuple) else (entry,):
                    if axis is None:
                        continue
                    where = f"sharding of {rule.role}, {column}"
                    if axis not in axes:
                        raise UserError(
                            f"{where}: axis {axis!r} of dimension {dimension} is not one of"
                            f" {', '.join(axes)}{nearest(axis, axes)}"
                        )
                    if axis in seen:
                        raise UserError(
                            f"{where}: axis {axis!r} splits dimensions {seen[axis]} and"
                            f" {dimension}; it can split one"
                        )
                    seen[axis] = dimension
        for axis in rule.gather:
            if axis not in axes:
                raise UserError(
                    f"sharding of {rule.role}, gather: axis {axis!r} is not one of"
                    f" {', '.join(axes)}{nearest(axis, axes)}"
                )


def make_mesh(
    data: int = 1, lane: int = 1, devices: Iterable[Any] | None = None, *, fsdp: int = 1
) -> Mesh:
    """A `data` × `fsdp` × `lane` mesh; lanes are neighbours, since they talk most.

    Raises UserError when there are fewer devices to hand.
    """
    sizes = {DATA: data, FSDP: fsdp, LANE: lane}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UserError(f"mesh: {name} {size!r} must be a positive integer")
    devices = list(jax.devices() if devices is None else devices)
    needed = data * fsdp * lane
    if len(devices) < needed:
        shown = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"mesh: {shown} needs {needed} devices; {len(devices)} are available")
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices[:needed],
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
