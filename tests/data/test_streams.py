"""Streamed datasets: exact resume, twice; every epoch complete; repeats left out."""

import pytest
from batch_rows import names, same, take

from data import DataConfig, build_dataset, build_eval_dataset, closing, counts, training_texts
from data import streams as streams_module
from laneformer_jax import settings
from laneformer_jax.errors import UserError

ALL = {f"text{s}{i}" for s, n in enumerate((7, 5, 9)) for i in range(n)}
SIZES = {"seq_len": 24, "batch_size": 2, "seed": 3}


def config(packing="best_fit", prefetch_batches=0, deduplicate=True, **fields):
    source = {"kind": "hub", "path": "acme/docs", "streaming": True, "shuffle_window": 4, **fields}
    data = {
        "sources": {"docs": source},
        "packing": packing,
        "packing_bins": 3,
        "prefetch_batches": prefetch_batches,
        "deduplicate": deduplicate,
    }
    return settings.from_dict(DataConfig, data)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("deduplicate", [True, False])
def test_resumes_exactly_twice(hub, tokenizer, packing, deduplicate, monkeypatch):
    monkeypatch.setattr(streams_module, "GENERATION", 5)
    cfg = config(packing, deduplicate=deduplicate)
    make = lambda: build_dataset(cfg, tokenizer, **SIZES)  # noqa: E731
    whole, _ = take(make(), 16)
    for cut in (1, 4, 7, 10):
        first, state = take(make(), cut)
        second, state = take(make(), 3, state)
        third, _ = take(make(), 3, state)
        seen = first + second + third
        assert all(map(same, seen, whole[: len(seen)]))


def test_prefetched_streams_resume(hub, tokenizer):
    cfg = config(prefetch_batches=2)
    whole, _ = take(build_dataset(cfg, tokenizer, **SIZES), 9)
    first, state = take(build_dataset(cfg, tokenizer, **SIZES), 4)
    rest, _ = take(build_dataset(cfg, tokenizer, **SIZES), 5, state)
    assert all(map(same, first + rest, whole))


def test_three_files_for_two_and_a_half_epochs(hub, tokenizer):
    """The end of the last file of an epoch starts the next, in another order."""
    batches, _ = take(build_dataset(config(), tokenizer, seq_len=24, batch_size=1, seed=0), 53)
    seen = names(batches, tokenizer)
    assert len(seen) >= 2.5 * len(ALL)
    # Windows may reach over the end of an epoch: compare what must have come.
    assert all(seen.count(name) >= 2 for name in ALL)
    assert seen[:21] != seen[21:42]


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_processes_share_a_stream(hub, tokenizer, processes):
    """3 files on 2, 3 and 8 processes: every row once."""
    seen = []
    for p in range(processes):
        dataset = build_dataset(
            config(epochs=1),
            tokenizer,
            seq_len=24,
            batch_size=processes,
            seed=0,
            process_index=p,
            process_count=processes,
        )
        seen += names(take(dataset, 25)[0], tokenizer)
    assert sorted(seen) == sorted(ALL)


def test_repeats_in_a_stream_are_left_out_and_counted(hub, tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [f"text{i % 5}. alpha" for i in range(12)]
    pq.write_table(pa.table({"text": rows}), hub / "acme/docs/data/train-00001-of-00003.parquet")
    _, state = take(build_dataset(config(epochs=2), tokenizer, **SIZES))
    # Both epochs keep the first of each: nothing of an earlier epoch counts as a repeat.
    assert counts(state)["docs"]["skipped_duplicate"] == 2 * 7
    _, state = take(build_dataset(config(epochs=2, deduplicate=False), tokenizer, **SIZES))
    assert "skipped_duplicate" not in counts(state)["docs"]


def test_held_out_rows_of_a_stream(hub, tokenizer):
    cfg = config(heldout=0.3, epochs=1)
    trained = names(take(build_dataset(cfg, tokenizer, **SIZES))[0], tokenizer)
    batches, _ = take(build_eval_dataset(cfg, tokenizer, seq_len=24, batch_size=2))
    evaluated = names(batches, tokenizer)
    assert evaluated
    assert not set(trained) & set(evaluated)
    assert sorted(trained + evaluated) == sorted(ALL)
    texts = list(training_texts(cfg))
    assert sorted(t.split(".")[0] for t in texts) == sorted(trained)


def test_streams_mix_with_other_sources(hub, tokenizer, corpora):
    cfg = settings.from_dict(
        DataConfig,
        {
            "sources": {
                "docs": {"kind": "hub", "path": "acme/docs", "streaming": True, "weight": 0.25},
                "text": {"kind": "jsonl", "path": str(corpora / "text.jsonl"), "weight": 0.75},
            },
            "prefetch_batches": 0,
        },
    )
    whole, state = take(build_dataset(cfg, tokenizer, seq_len=64, batch_size=2, seed=0), 30)
    first, middle = take(build_dataset(cfg, tokenizer, seq_len=64, batch_size=2, seed=0), 13)
    rest, _ = take(build_dataset(cfg, tokenizer, seq_len=64, batch_size=2, seed=0), 17, middle)
    assert all(map(same, first + rest, whole))
    read = counts(state)
    total = sum(c["tokens"] for c in read.values())
    assert read["docs"]["tokens"] == pytest.approx(total / 4, abs=100)


def test_an_unknown_split_is_told_at_once(hub, tokenizer):
    with (
        pytest.raises(UserError, match="source 'docs': acme/docs: split = 'tran'"),
        closing(build_dataset(config(split="tran"), tokenizer, **SIZES)) as batches,
    ):
        next(batches)
