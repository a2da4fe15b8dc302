"""The state of a training iterator: what it belongs to, joining the processes' parts, its counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.config import DataConfig
from data.documents import Encoder
from laneformer_jax import settings
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import Tokenizer


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those that the processes of a run got at the same step.

    The result restores any process of a run with the same number of shards, or with a number of
    processes that divides it.
    """
    merged = dict(states[0])
    merged["shards"] = {k: v for state in states for k, v in state["shards"].items()}
    return merged


def counts(state: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Per source, what an iterator with this state has read: `documents`, `tokens`, `bytes`,
    `truncated`, and `skipped_<reason>` for each reason that occurred.

    What waits in a packer, or in a batch prepared in advance, is not counted yet.
    """
    total: dict[str, dict[str, int]] = {}
    for shard in state["shards"].values():
        for name, source in _mixture_state(shard)["sources"].items():
            into = total.setdefault(name, {})
            for key, value in source["counts"].items():
                into[key] = into.get(key, 0) + value
    return total


def _mixture_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    while "sources" not in state:
        state = state["parent_state"] if "parent_state" in state else state["parent"]
    return state


def fingerprint(
    config: DataConfig,
    encoders: Sequence[Encoder],
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int,
) -> dict[str, Any]:
    """What decides which batches come, by the names a person would look for."""
    out: dict[str, Any] = {
        "tokenizer": tokenizer.sha256[:16],
        "seed": seed,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "packing": config.packing,
        "packing_bins": config.packing_bins if config.packing == "best_fit" else None,
        "deduplicate": config.deduplicate,
        "decontaminate": config.decontaminate,
        "schedule": _digest(settings.to_dict(config)["schedule"]),
        "chat_template": _digest(encoders[0].template.source),
    }
    for e in encoders:
        out[f"sources.{e.name}"] = _digest(settings.to_dict(e.config))
        out[f"documents of source {e.name}"] = e.size
    return out


def check_fingerprint(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError, naming what differs, unless both are of the same data."""
    changed = [k for k in {**saved, **now} if saved.get(k) != now.get(k)]
    if changed:
        told = "; ".join(f"{k}: {saved.get(k)} then, {now.get(k)} now" for k in changed)
        raise UserError(
            f"data state: belongs to other data ({told}); restore the settings of that run, or"
            " start the data afresh from the checkpoint's parameters"
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
