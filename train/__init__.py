"""One trainer for pretraining, midtraining and instruction tuning.

    config = settings.load(RunConfig, "configs/quickstart/pretrain.yaml", ["train.steps=200"])
    result = train(config, out="runs/pretrain")

Each phase may start from another's parameters (`init_from`). `laneformer train` is the same from
the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config import RunConfig
    from train.loop import Result, train

_HOME = {"RunConfig": "train.config", "Result": "train.loop", "train": "train.loop"}

__all__ = ["Result", "RunConfig", "train"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line starts without JAX.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
