"""What an ablation compares: a base run, cells of model fields, learning rates and seeds."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laneformer_jax import settings
from laneformer_jax.errors import UserError, nearest
from train.config import ModelConfig, RunConfig

DENSE = math.inf  # as broadcast_delay: ordinary tensor parallelism, which is the dense model
# What a run writes and how it is shown, which do not change what is learnt.
_NO_EFFECT = ("checkpoint", "log", "benchmarks")


@dataclass(frozen=True)
class AblationConfig:
    """The same training for every cell, at learning rates and seeds.

    Attributes:
        base: a RunConfig as a mapping, with `model`; without `tokenizer`, one of the model's
            vocabulary is trained on its data first.
        cells: name -> fields of the model's config; `broadcast_delay: .inf` is the dense model.
        grid: field -> values; every combination is a cell as well.
        learning_rates: each cell is tuned over these with `tune_seed`.
        tune_seed: of the tuning runs.
        seeds: of the runs that are compared, each at its cell's best learning rate. A seed fixes
            initialisation and data order, so that cells are compared seed by seed.
        baseline: the cell that the others are compared with.
    """

    base: dict[str, Any]
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=lambda: [3e-3])
    tune_seed: int = 0
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    baseline: str = "dense"

    def __post_init__(self) -> None:
        if "model" not in self.base:
            raise ValueError("base: needs a model, such as model.preset=tiny")
        for name in ("learning_rates", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} = {values}: must be different values, at least one")
        cells = expand(self)
        if self.baseline not in cells:
            raise ValueError(
                f"baseline: {self.baseline!r} is no cell{nearest(self.baseline, cells)}; cells: "
                f"{', '.join(cells)}"
            )


@dataclass(frozen=True)
class Run:
    """One training: a cell at a learning rate and a seed."""

    cell: str
    learning_rate: float
    seed: int
    config: RunConfig
    key: str  # of everything that decides the result


def expand(config: AblationConfig) -> dict[str, dict[str, Any]]:
    """Every cell by name: those given, then the grid's combinations."""
    cells = dict(config.cells)
    if config.grid:
        for values in itertools.product(*config.grid.values()):
            chosen = dict(zip(config.grid, values, strict=True))
            cells[",".join(f"{name}={value}" for name, value in chosen.items())] = chosen
    return cells


def make_run(
    config: AblationConfig, cell: str, learning_rate: float, seed: int, tokenizer: Path
) -> Run:
    """The resolved run of a cell, and its key.

    Raises UserError naming the cell when its fields do not make a model.
    """
    data = {"tokenizer": str(tokenizer), **config.base}
    model = {"overrides": {}, **data["model"]}
    fields = _resolved(expand(config)[cell], model)
    data["model"] = {**model, "overrides": {**model["overrides"], **fields}}
    data["train"] = {**data.get("train", {}), "seed": seed}
    data["optimizer"] = {**data.get("optimizer", {}), "learning_rate": learning_rate}
    try:
        run = settings.from_dict(RunConfig, data)
    except UserError as error:
        raise UserError(f"cell {cell!r}: {error}") from None
    return Run(cell, learning_rate, seed, run, _key(run, tokenizer))


def check_cells(config: AblationConfig, tokenizer: Path) -> None:
    """Raise UserError unless every cell makes a model, all of one size."""
    sizes = {}
    for cell in expand(config):
        run = make_run(config, cell, config.learning_rates[0], config.seeds[0], tokenizer)
        assert run.config.model is not None
        sizes[cell] = run.config.model.build().num_parameters()
    wanted = sizes[config.baseline]
    other = next((cell for cell, size in sizes.items() if size != wanted), None)
    if other is not None:
        raise UserError(
            f"cell {other!r}: {sizes[other]:,} parameters, the baseline {config.baseline!r} has "
            f"{wanted:,}; cells must be of one size to be compared"
        )


def _resolved(fields: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's fields with an infinite delay spelled out."""
    if fields.get("broadcast_delay") != DENSE:
        return dict(fields)
    base = settings.from_dict(ModelConfig, model).build()
    layers = fields.get("num_hidden_layers", base.num_hidden_layers)
    return {**fields, "broadcast_delay": layers, "use_early_comm": True}


def _key(run: RunConfig, tokenizer: Path) -> str:
    """Of the run with its model written out in full and the tokenizer by content."""
    assert run.model is not None
    data = settings.to_dict(run)
    for name in _NO_EFFECT:
        del data[name]
    data["model"] = run.model.build().to_dict()
    if run.model.residual_init_scale != 1:
        data["model"]["residual_init_scale"] = run.model.residual_init_scale
    data["tokenizer"] = (
        hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else ""
    )
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
