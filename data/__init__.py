"""Data for training and evaluation: sources, mixtures, packing, tokenisation.

config = settings.load(DataConfig, "data.yaml")
dataset = build_dataset(config, tokenizer, seq_len=1024, batch_size=8, seed=0)
with closing(dataset) as batches:
    batch = next(batches)       # tokens, targets, loss_mask, segment_ids, positions [B, S]
    state = batches.get_state() # JSON-able; set_state on a fresh iterator continues exactly
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.config import DataConfig, SourceConfig
    from data.evaluation import build_eval_dataset
    from data.packing import Batch
    from data.pipeline import build_dataset, closing, training_texts
    from data.processes import kill_workers
    from data.state import counts, merge_states

_HOME = {
    "Batch": "data.packing",
    "DataConfig": "data.config",
    "SourceConfig": "data.config",
    "build_dataset": "data.pipeline",
    "build_eval_dataset": "data.evaluation",
    "closing": "data.pipeline",
    "counts": "data.state",
    "kill_workers": "data.processes",
    "merge_states": "data.state",
    "training_texts": "data.pipeline",
}

__all__ = [
    "Batch",
    "DataConfig",
    "SourceConfig",
    "build_dataset",
    "build_eval_dataset",
    "closing",
    "counts",
    "kill_workers",
    "merge_states",
    "training_texts",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line starts without grain.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
