"""Making batches, and reading them back: their segments, and the documents those came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import grain
import numpy as np

from data import DataConfig, closing
from data.packing import batch_of, pack
from laneformer_jax import settings


def segments(batches: Iterable[dict]) -> Iterator[dict[str, np.ndarray]]:
    """Every segment of every row, in order, as 1-D arrays; checks the row's own structure."""
    for batch in batches:
        check(batch)
        for r in range(len(batch["tokens"])):
            ids = batch["segment_ids"][r]
            for s in range(1, ids.max(initial=0) + 1):
                yield {k: v[r][ids == s] for k, v in batch.items()}


def check(batch: dict[str, np.ndarray]) -> None:
    """What every batch must be: shapes, types, segments from 1, positions from 0, clean padding."""
    assert {k: v.dtype.name for k, v in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "loss_mask": "float32",
        "segment_ids": "int32",
        "positions": "int32",
    }
    assert len({v.shape for v in batch.values()}) == 1
    assert set(np.unique(batch["loss_mask"])) <= {0.0, 1.0}
    for r, ids in enumerate(batch["segment_ids"]):
        used = int((ids > 0).sum())
        assert (ids[used:] == 0).all()
        for name in ("tokens", "targets", "loss_mask", "positions"):
            assert (batch[name][r][used:] == 0).all()
        if used:
            assert ids[0] == 1
            assert set(np.diff(ids[:used])) <= {0, 1}
            starts = np.flatnonzero(np.diff(ids[:used], prepend=0))
            expected = np.arange(used) - starts[ids[:used] - 1]
            assert np.array_equal(batch["positions"][r][:used], expected)


def pairs(batches: Iterable[dict]) -> list[tuple[int, int]]:
    """Every `(input, target)` pair with loss."""
    out = []
    for s in segments(batches):
        on = s["loss_mask"] > 0
        out += list(zip(s["tokens"][on].tolist(), s["targets"][on].tolist(), strict=True))
    return out


def names(batches: Iterable[dict], tokenizer) -> list[str]:
    """The names, such as `text7`, of the documents that begin in these batches, in order."""
    found = []
    for s in segments(batches):
        text = tokenizer.decode(s["tokens"].tolist())
        match = re.match(r"(text|code|pair|chat)\d+\.", text)
        if match and s["tokens"][0] == tokenizer.bos_id:
            found.append(match[0][:-1])
    return found


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def write_jsonl(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def packed(examples, seq_len, method, bins=4, batch=2):
    """Batches of `batch` rows from examples [n, 2]; the last is filled with rows of padding."""
    source = grain.MapDataset.source([{"example": e} for e in examples]).to_iter_dataset()
    rows = list(pack(source, seq_len, method, bins, seed=0))
    like = {k: np.zeros_like(v) for k, v in rows[0].items()}
    rows += [like] * (-len(rows) % batch)
    stacks = [
        {k: np.stack([r[k] for r in rows[i : i + batch]]) for k in like}
        for i in range(0, len(rows), batch)
    ]
    return [batch_of(s) for s in stacks]


def config_of(sources, **fields):
    """A mixture of `sources` that is read in this thread, unless `fields` say otherwise."""
    plain = {"prefetch_batches": 0, "read_threads": 0}
    return settings.from_dict(DataConfig, {"sources": sources, **plain, **fields})


def take(dataset, n=None, state=None):
    """`n` batches (all when None), and the state after them."""
    with closing(dataset) as it:
        if state is not None:
            it.set_state(json.loads(json.dumps(state)))
        return list(islice(it, n)), it.get_state()
