"""Documents into rows of one length, with segment ids and positions, then into batches.

Legend: B rows of a batch · S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import grain
import numpy as np
from grain.experimental import (
    BestFitPackIterDataset,
    ConcatThenSplitIterDataset,
    FlatMapIterDataset,
)

from data.documents import IGNORE

Batch = dict[str, np.ndarray]


def pack(
    documents: grain.IterDataset,
    seq_len: int,
    method: Literal["concat", "best_fit"],
    bins: int,
    seed: int,
) -> grain.IterDataset:
    """Rows of `seq_len` tokens from documents `{"example": [n, 2]}`.

    `concat` cuts documents at the ends of rows; a part that continues in the next row is a segment
    of its own there. `best_fit` cuts only what is longer than a row and pads.
    """
    if method == "concat":
        return _JsonState(ConcatThenSplitIterDataset(documents, length_struct={"example": seq_len}))
    return BestFitPackIterDataset(
        FlatMapIterDataset(documents, _Split(seq_len)),
        length_struct={"example": seq_len},
        num_packing_bins=bins,
        seed=seed,
    )


def batch_of(rows: Mapping[str, np.ndarray]) -> Batch:
    """The arrays of a training batch from packed rows stacked to [B, S, …].

    Returns:
        `tokens`, `targets` int32 [B, S]; `loss_mask` float32 [B, S], the weight of predicting each
        target, 0 in padding; `segment_ids` int32 [B, S], 1 for a row's first document, 0 for
        padding; `positions` int32 [B, S], from 0 in each segment.
    """
    example_BS2, segment_ids_BS = rows["example"], rows["example_segment_ids"]
    targets_BS = np.ascontiguousarray(example_BS2[..., 1])
    predicted_BS = (targets_BS != IGNORE) & (segment_ids_BS > 0)
    return {
        "tokens": np.ascontiguousarray(example_BS2[..., 0]),
        "targets": np.where(predicted_BS, targets_BS, 0).astype(np.int32),
        "loss_mask": predicted_BS.astype(np.float32),
        "segment_ids": segment_ids_BS.astype(np.int32),
        "positions": rows["example_positions"].astype(np.int32),
    }


def stacked(rows: Sequence[Mapping[str, np.ndarray] | None]) -> Batch:
    """A batch from packed rows; None is a row of padding. At least one must not be."""
    like = next(row for row in rows if row is not None)
    empty = {k: np.zeros_like(v) for k, v in like.items()}
    filled = [empty if row is None else row for row in rows]
    return batch_of({k: np.stack([row[k] for row in filled]) for k in like})


def padding(batch_size: int, seq_len: int) -> Batch:
    """A batch of nothing but padding."""
    shape = (batch_size, seq_len)
    return {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.float32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
    }


class _Split(grain.experimental.FlatMapTransform):
    """Cuts what is longer than a row."""

    max_fan_out = 1 << 30

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, document: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        example = document["example"]
        return [
            {"example": example[i : i + self._length]} for i in range(0, len(example), self._length)
        ]


class _JsonState(grain.IterDataset):
    """Lets a concat packer's state pass through JSON: it compares its slices with tuples."""

    def __iter__(self) -> grain.DatasetIterator:
        return _JsonStateIterator(iter(self._parent))


class _JsonStateIterator(grain.DatasetIterator):
    def __next__(self) -> Any:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return self._parent.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        slices = {k: tuple(v) for k, v in state["remainder_slices"].items()}
        self._parent.set_state({**state, "remainder_slices": slices})
