"""Documents into rows of one length, with segment ids and positions, then into batches.

Legend: B rows of a batch · S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset, ConcatThenSplitIterDataset

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
        _Split(documents, seq_len),
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
        "targets": np.where(predicted_BS, targets_BS, np.int32(0)),
        "loss_mask": predicted_BS.astype(np.float32),
        "segment_ids": segment_ids_BS.astype(np.int32, copy=False),
        "positions": rows["example_positions"].astype(np.int32, copy=False),
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


class _Split(grain.IterDataset):
    """Cuts what is longer than a row; grain's own flat map costs more than the packing."""

    def __init__(self, documents: grain.IterDataset, length: int):
        super().__init__(documents)
        self.length = length

    def __iter__(self) -> grain.DatasetIterator:
        return _SplitIterator(iter(self._parent), self.length)


class _SplitIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, length: int):
        super().__init__(parent)
        self._documents, self._length = parent, length
        # Where the document that is being cut began, and its parts given and still to come.
        self._before, self._given = parent.get_state(), 0
        self._rest: np.ndarray | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        if self._rest is None:
            self._before, self._given = self._documents.get_state(), 0
            self._rest = next(self._documents)["example"]
        part, self._rest = self._rest[: self._length], self._rest[self._length :]
        self._given += 1
        if not len(self._rest):
            self._rest = None
        return {"example": part}

    def get_state(self) -> dict[str, Any]:
        if self._rest is None:
            return {"parent": self._documents.get_state(), "given": 0}
        return {"parent": self._before, "given": self._given}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._documents.set_state(state["parent"])
        self._rest = None
        for _ in range(int(state["given"])):
            next(self)


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
