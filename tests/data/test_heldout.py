"""Held-out documents: never trained on, evaluated once each, the same however many read them."""

import pytest
from batch_rows import config_of, names, same, take

from data import build_dataset, build_eval_dataset, training_texts
from laneformer_jax.errors import UserError


def eval_names(cfg, tokenizer, seq_len=32, **kwargs):
    batches, _ = take(build_eval_dataset(cfg, tokenizer, seq_len=seq_len, batch_size=4, **kwargs))
    return names(batches, tokenizer), batches


def test_held_out_documents_are_never_trained_on(held, tokenizer):
    cfg = config_of({k: v for k, v in held.items() if k != "chat"})
    evaluated, _ = eval_names(cfg, tokenizer, seq_len=4096)
    assert len(evaluated) == len(set(evaluated))
    batches, _ = take(build_dataset(cfg, tokenizer, seq_len=4096, batch_size=2, seed=0), 12)
    trained = set(names(batches, tokenizer))
    assert not trained & set(evaluated)
    everything = {f"code{i}" for i in range(40)} | {f"text{i}" for i in range(150)}
    assert trained | set(evaluated) == everything
    assert 0.2 < len(evaluated) / len(everything) < 0.4
    text = "\n".join(training_texts(cfg))
    assert not [n for n in evaluated if f"{n}. " in text]
    assert all(f"{n}. " in text for n in everything - set(evaluated))


def test_evaluation_is_the_same_every_time_and_covers_each_document_once(held, tokenizer):
    cfg = config_of(held)
    _, batches = eval_names(cfg, tokenizer)
    _, again = eval_names(cfg, tokenizer)
    assert len(batches) == len(again)
    assert all(map(same, batches, again))
    assert batches[-1]["segment_ids"].shape == (4, 32)
    first, _ = eval_names(cfg, tokenizer, seq_len=4096)
    only, _ = eval_names(cfg, tokenizer, seq_len=4096, sources=["text"])
    assert only == [n for n in first if n.startswith("text")]
    _, few = eval_names(cfg, tokenizer, max_batches=2)
    assert len(few) == 2
    assert all(map(same, few, batches))


@pytest.mark.parametrize("processes", [2, 4])
def test_evaluation_gives_every_process_as_many_batches(tmp_path, tokenizer, processes):
    """7 short documents on 4 processes: the global batches are those of one process."""
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"text{i}. alpha beta")
    cfg = config_of(
        {"text": {"kind": "text", "path": str(tmp_path), "heldout": 0.999999}}, packing="best_fit"
    )
    alone, _ = take(build_eval_dataset(cfg, tokenizer, seq_len=16, batch_size=4))
    parts = []
    for p in range(processes):
        dataset = build_eval_dataset(
            cfg, tokenizer, seq_len=16, batch_size=4, process_index=p, process_count=processes
        )
        parts.append(take(dataset)[0])
    assert {len(p) for p in parts} == {len(alone)}
    for i, batch in enumerate(alone):
        for key, value in batch.items():
            assert [r for p in parts for r in p[i][key].tolist()] == value.tolist()
    assert len(names(alone, tokenizer)) == 7


def test_evaluation_needs_held_out_documents(mixed, held, tokenizer):
    with pytest.raises(UserError, match="no source holds documents out"):
        build_eval_dataset(config_of(mixed), tokenizer, seq_len=8, batch_size=1)
    with pytest.raises(
        UserError, match=r"eval.sources: 'txt' is not in the mixture \(did you mean 'text'"
    ):
        build_eval_dataset(config_of(held), tokenizer, seq_len=8, batch_size=1, sources=["txt"])


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_evaluation_does_not_depend_on_workers(held, tokenizer, packing):
    plain, worked = (
        take(
            build_eval_dataset(
                config_of(held, num_workers=n, packing=packing), tokenizer, seq_len=32, batch_size=4
            )
        )[0]
        for n in (0, 2)
    )
    assert len(plain) == len(worked)
    assert all(map(same, plain, worked))
