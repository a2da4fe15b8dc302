"""Worker processes: the batches of one process, whatever their number; and how they end."""

import multiprocessing
from itertools import islice

import pytest
from batch_rows import config_of, same, take, write_jsonl

from data import build_dataset, closing
from laneformer_jax.errors import UserError

SIZES = {"seq_len": 32, "batch_size": 4, "seed": 3}


def test_worker_processes_change_nothing(mixed, tokenizer):
    cfg = config_of({"text": mixed["text"]}, num_workers=2)
    plain, state = take(build_dataset(config_of({"text": mixed["text"]}), tokenizer, **SIZES), 9)
    worked, after = take(build_dataset(cfg, tokenizer, **SIZES), 9)
    assert all(map(same, plain, worked))
    assert after == state


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_mixed_run_moves_between_numbers_of_workers(mixed, tokenizer, packing):
    def run(workers, n, state=None):
        cfg = config_of(mixed, num_workers=workers, packing=packing, prefetch_batches=2)
        return take(build_dataset(cfg, tokenizer, **SIZES), n, state)

    whole, _ = run(0, 12)
    seen, state = [], None
    for workers, n in ((1, 3), (3, 3), (0, 3), (2, 3)):
        batches, state = run(workers, n, state)
        seen += batches
    assert all(map(same, seen, whole))


def data_workers():
    return [p for p in multiprocessing.active_children() if p.name == "laneformer-data"]


def test_workers_are_as_many_as_asked_for_and_end_with_the_iterator(mixed, tokenizer):
    """Whatever the number of sources and shards."""
    cfg = config_of(mixed, num_workers=2, num_shards=4)
    with closing(build_dataset(cfg, tokenizer, **SIZES)) as batches:
        next(batches)
        assert len(data_workers()) == 2
    assert data_workers() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_killed_worker_ends_the_run(mixed, tokenizer, prefetch):
    cfg = config_of(mixed, num_workers=2, prefetch_batches=prefetch)
    with closing(build_dataset(cfg, tokenizer, **SIZES)) as batches:
        next(batches)
        data_workers()[0].kill()
        with pytest.raises(UserError, match=r"data worker \d+ ended with exit code -9"):
            list(islice(batches, 2000))


def test_a_bad_document_stops_workers_where_it_stops_one_process(tmp_path, tokenizer):
    rows = [{"text": f"text{i}. alpha"} for i in range(60)] + [{"txt": "x"}]
    write_jsonl(tmp_path / "x.jsonl", rows)
    source = {"kind": "jsonl", "path": str(tmp_path / "x.jsonl")}
    seen, errors = [], []
    for workers in (0, 2):
        cfg = config_of({"text": source}, num_workers=workers)
        seen.append([])
        with (
            pytest.raises(UserError, match=r"source 'text': .*x\.jsonl:61: field 'text'") as caught,
            closing(build_dataset(cfg, tokenizer, **SIZES)) as batches,
        ):
            seen[-1].extend(batches)
        errors.append(str(caught.value))
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(map(same, *seen))
    assert errors[0] == errors[1]
