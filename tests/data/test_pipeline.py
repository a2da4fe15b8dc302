"""Batches: deterministic, complete, dealt without overlap, and resumed exactly."""

import json
import multiprocessing
from collections import Counter
from itertools import islice

import pytest
from batch_rows import check, names, pairs, same, segments, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from data import (
    DataConfig,
    build_dataset,
    build_eval_dataset,
    closing,
    counts,
    merge_states,
    training_texts,
)
from laneformer_jax import settings as run_settings
from laneformer_jax.errors import UserError

SIZES = {"seq_len": 32, "batch_size": 4, "seed": 3}


@pytest.fixture(scope="module")
def mixed(corpora):
    """Three sources of different kinds."""
    return {
        "code": {"kind": "text", "path": str(corpora / "code"), "pattern": "*.py", "weight": 0.5},
        "text": {"kind": "jsonl", "path": str(corpora / "text.jsonl"), "weight": 0.3},
        "chat": {
            "kind": "jsonl",
            "path": str(corpora / "chat.jsonl"),
            "format": "messages",
            "weight": 0.2,
        },
    }


@pytest.fixture(scope="module")
def held(mixed):
    return {name: {**source, "heldout": 0.3} for name, source in mixed.items()}


def config(sources, **fields):
    plain = {"prefetch_batches": 0, "read_threads": 0}
    return run_settings.from_dict(DataConfig, {"sources": sources, **plain, **fields})


def take(dataset, n=None, state=None):
    """`n` batches (all when None), and the state after them."""
    with closing(dataset) as it:
        if state is not None:
            it.set_state(json.loads(json.dumps(state)))
        return list(islice(it, n)), it.get_state()


@pytest.mark.smoke
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_resumes_exactly_twice_into_fresh_iterators(mixed, tokenizer, packing):
    cfg = config(mixed, packing=packing, packing_bins=6)
    make = lambda: build_dataset(cfg, tokenizer, **SIZES)  # noqa: E731
    whole, _ = take(make(), 24)
    for b in whole:
        check(b)
    for cut in range(1, 16, 3):
        first, state = take(make(), cut)
        second, state = take(make(), 3, state)
        third, _ = take(make(), 4, state)
        for a, b in zip(first + second + third, whole, strict=False):
            assert same(a, b)


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    packing=st.sampled_from(["concat", "best_fit"]),
    seq_len=st.sampled_from([48, 65]),
    background=st.booleans(),
    shards=st.sampled_from([1, 2]),
)
def test_any_sequence_of_stops_gives_the_uninterrupted_batches(
    mixed, tokenizer, cuts, packing, seq_len, background, shards
):
    cfg = config(
        mixed,
        packing=packing,
        packing_bins=5,
        prefetch_batches=2 * background,
        read_threads=2 * background,
        num_shards=shards,
    )
    make = lambda: build_dataset(cfg, tokenizer, seq_len=seq_len, batch_size=2, seed=1)  # noqa: E731
    whole, _ = take(make(), sum(cuts) + 2)
    seen, state = [], None
    for n in [*cuts, 2]:
        batches, state = take(make(), n, state)
        seen += batches
    assert len(seen) == len(whole)
    assert all(map(same, seen, whole))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_finite_sources_resume_up_to_their_end(mixed, tokenizer, packing):
    finite = {name: {**source, "epochs": 1} for name, source in mixed.items()}
    cfg = config(finite, packing=packing, packing_bins=6)
    make = lambda: build_dataset(cfg, tokenizer, seq_len=64, batch_size=3, seed=1)  # noqa: E731
    whole, end = take(make())
    assert take(make(), state=end)[0] == []
    for cut in (*range(1, len(whole), 20), len(whole) - 1):
        first, state = take(make(), cut)
        rest, _ = take(make(), state=state)
        assert len(first) + len(rest) == len(whole)
        assert all(map(same, first + rest, whole))


def test_counts_tell_what_was_read(mixed, tokenizer):
    _, state = take(build_dataset(config(mixed), tokenizer, **SIZES), 200)
    read = counts(state)
    total = sum(c["tokens"] for c in read.values())
    # What waits in a packer is counted only when its row is out.
    assert 0 <= 200 * 4 * 32 - total < 1000
    for name, share in (("code", 0.5), ("text", 0.3), ("chat", 0.2)):
        assert read[name]["tokens"] == pytest.approx(share * total, abs=150)
        assert read[name]["bytes"] > 0.9 * read[name]["tokens"]


def test_the_state_is_small_json(mixed, tokenizer):
    _, state = take(build_dataset(config(mixed), tokenizer, **SIZES), 5)
    assert len(json.dumps(state)) < 2500


def test_seeds_and_epochs_shuffle_anew(corpora, tokenizer):
    source = {"kind": "jsonl", "path": str(corpora / "text.jsonl"), "epochs": 2}
    orders = []
    for seed in (1, 2):
        # One row that holds both epochs.
        batches, _ = take(
            build_dataset(
                config({"text": source}), tokenizer, seq_len=60000, batch_size=1, seed=seed
            )
        )
        orders.append(names(batches, tokenizer))
        assert len(orders[-1]) == 300
    assert orders[0] != orders[1]
    first, second = orders[0][:150], orders[0][150:300]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 150
    assert first != second


@settings(max_examples=15, deadline=None)
@given(
    documents=st.integers(1, 20),
    processes=st.sampled_from([1, 2, 3, 4, 8]),
    epochs=st.integers(1, 3),
)
def test_processes_share_every_epoch_without_overlap(
    tmp_path_factory, tokenizer, documents, processes, epochs
):
    """Also fewer documents than processes, and numbers that do not divide."""
    folder = tmp_path_factory.mktemp("few")
    for i in range(documents):
        (folder / f"{i}.txt").write_text(f"text{i}. alpha")
    source = {"kind": "text", "path": str(folder), "epochs": epochs}
    cfg = config({"text": source}, packing="best_fit", packing_bins=2)
    seen = []
    for p in range(processes):
        dataset = build_dataset(
            cfg,
            tokenizer,
            seq_len=64,
            batch_size=processes,
            seed=0,
            process_index=p,
            process_count=processes,
        )
        batches, _ = take(dataset, 4 + documents * epochs * 2)
        assert {len(b["tokens"]) for b in batches} <= {1}
        seen.append(names(batches, tokenizer))
    assert Counter(n for part in seen for n in part) == {
        f"text{i}": epochs for i in range(documents)
    }


def test_global_batches_do_not_depend_on_processes(mixed, tokenizer):
    """8 shards on 1, 2 and 4 processes, moved between them by a merged state."""
    cfg = config(mixed, num_shards=8)

    def run(processes, n, state=None):
        parts, states = [], []
        for p in range(processes):
            dataset = build_dataset(
                cfg,
                tokenizer,
                seq_len=32,
                batch_size=8,
                seed=5,
                process_index=p,
                process_count=processes,
            )
            batches, after = take(dataset, n, state)
            parts.append(batches)
            states.append(after)
        joined = [[row for p in parts for row in p[i]["tokens"].tolist()] for i in range(n)]
        return joined, merge_states(states)

    whole, _ = run(1, 9)
    first, state = run(4, 3)
    second, state = run(2, 3, state)
    third, _ = run(1, 3, state)
    assert first + second + third == whole


def test_fewer_processes_take_over_the_shards_of_more(mixed, tokenizer):
    """Without `num_shards`: 4 processes, then 2, then 1 continue the same four streams."""
    cfg = config(mixed)

    def part(p, count, n, state=None):
        dataset = build_dataset(
            cfg,
            tokenizer,
            seq_len=32,
            batch_size=4,
            seed=5,
            process_index=p,
            process_count=count,
        )
        return take(dataset, n, state)

    four = [part(p, 4, 6) for p in range(4)]
    saved = merge_states([part(p, 4, 2)[1] for p in range(4)])
    for count in (1, 2):
        later = [part(p, count, 4, saved)[0] for p in range(count)]
        for i in range(4):
            rows = [r for p in later for r in p[i]["tokens"].tolist()]
            assert rows == [r for p in four for r in p[0][i + 2]["tokens"].tolist()]


def test_states_that_cannot_be_continued_are_refused(mixed, tokenizer, corpora):
    def build(sources=mixed, index=0, count=1, seed=3, seq_len=32):
        return build_dataset(
            config(sources),
            tokenizer,
            seq_len=seq_len,
            batch_size=4,
            seed=seed,
            process_index=index,
            process_count=count,
        )

    _, one = take(build(), 2)
    _, half = take(build(index=0, count=2), 2)
    other = {**mixed, "code": {**mixed["code"], "weight": 0.9}}
    for dataset, state, found in (
        (build(count=2), one, "has 1 shards, which 2 processes"),
        (build(index=1, count=2), half, r"lacks the shards \[1\] of process 1"),
        (build(sources=other), one, r"other data \(sources.code: "),
        (build(seed=4), one, r"other data \(seed: 3 then, 4 now\)"),
        (build(seq_len=16), one, "seq_len: 32 then, 16 now"),
    ):
        with pytest.raises(UserError, match=found):
            take(dataset, 1, state)


def test_a_changed_number_of_documents_is_noticed(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("alpha")
    sources = {"text": {"kind": "text", "path": str(tmp_path)}}
    _, state = take(build_dataset(config(sources), tokenizer, **SIZES), 1)
    (tmp_path / "b.txt").write_text("beta")
    with pytest.raises(UserError, match="documents of source text: 1 then, 2 now"):
        take(build_dataset(config(sources), tokenizer, **SIZES), 1, state)


def test_processes_see_different_rows(mixed, tokenizer):
    parts = [
        take(build_dataset(config(mixed), tokenizer, **SIZES, process_index=p, process_count=2), 4)[
            0
        ]
        for p in range(2)
    ]
    assert all(len(b["tokens"]) == 2 for part in parts for b in part)
    assert not any(map(same, *parts))


def test_worker_processes_change_nothing(mixed, tokenizer):
    cfg = config({"text": mixed["text"]}, num_workers=2)
    plain, state = take(build_dataset(config({"text": mixed["text"]}), tokenizer, **SIZES), 9)
    worked, after = take(build_dataset(cfg, tokenizer, **SIZES), 9)
    assert all(map(same, plain, worked))
    assert after == state


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_mixed_run_moves_between_numbers_of_workers(mixed, tokenizer, packing):
    def run(workers, n, state=None):
        cfg = config(mixed, num_workers=workers, packing=packing, prefetch_batches=2)
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
    cfg = config(mixed, num_workers=2, num_shards=4)
    with closing(build_dataset(cfg, tokenizer, **SIZES)) as batches:
        next(batches)
        assert len(data_workers()) == 2
    assert data_workers() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_killed_worker_ends_the_run(mixed, tokenizer, prefetch):
    cfg = config(mixed, num_workers=2, prefetch_batches=prefetch)
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
        cfg = config({"text": source}, num_workers=workers)
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


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_evaluation_does_not_depend_on_workers(held, tokenizer, packing):
    plain, worked = (
        take(
            build_eval_dataset(
                config(held, num_workers=n, packing=packing), tokenizer, seq_len=32, batch_size=4
            )
        )[0]
        for n in (0, 2)
    )
    assert len(plain) == len(worked)
    assert all(map(same, plain, worked))


def test_finished_sources_end_every_process_alike(tmp_path, tokenizer):
    """One document, three processes: those without keep pace with padding instead of hanging."""
    (tmp_path / "a.txt").write_text("text0. alpha")
    cfg = config({"text": {"kind": "text", "path": str(tmp_path), "epochs": 1}})
    alone, _ = take(build_dataset(cfg, tokenizer, seq_len=32, batch_size=3, seed=0))
    assert len(alone) == 1
    total = []
    for p in range(3):
        dataset = build_dataset(
            cfg, tokenizer, seq_len=32, batch_size=3, seed=0, process_index=p, process_count=3
        )
        batches, _ = take(dataset, 3)
        assert len(batches) == 3
        assert all(b["segment_ids"].max() == 0 for b in batches[1:])
        total += pairs(batches)
    assert Counter(total) == Counter(pairs(alone))


def test_sizes_that_do_not_divide_are_refused(mixed, tokenizer):
    with pytest.raises(
        UserError, match="batch_size = 4: must be a multiple of the number of shards, 3"
    ):
        build_dataset(config(mixed), tokenizer, **SIZES, process_count=3)
    with pytest.raises(
        UserError, match="num_shards = 4: must be a multiple of the number of processes, 3"
    ):
        build_dataset(config(mixed, num_shards=4), tokenizer, **SIZES, process_count=3)
    with pytest.raises(UserError, match="no source is given"):
        build_dataset(config({}), tokenizer, **SIZES)


# Held-out documents


def eval_names(cfg, tokenizer, seq_len=32, **kwargs):
    batches, _ = take(build_eval_dataset(cfg, tokenizer, seq_len=seq_len, batch_size=4, **kwargs))
    return names(batches, tokenizer), batches


def test_held_out_documents_are_never_trained_on(held, tokenizer):
    cfg = config({k: v for k, v in held.items() if k != "chat"})
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
    cfg = config(held)
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
    cfg = config(
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
        build_eval_dataset(config(mixed), tokenizer, seq_len=8, batch_size=1)
    with pytest.raises(
        UserError, match=r"eval.sources: 'txt' is not in the mixture \(did you mean 'text'"
    ):
        build_eval_dataset(config(held), tokenizer, seq_len=8, batch_size=1, sources=["txt"])


def test_a_source_without_a_usable_document_ends_the_run(mixed, tokenizer):
    """Every conversation is cut before its first label: an error, not a loop."""
    cfg = config(mixed, packing="best_fit")
    with pytest.raises(
        UserError, match=r"source 'chat': none of its documents can be used \(no_label"
    ):
        take(build_dataset(cfg, tokenizer, seq_len=4, batch_size=1, seed=0), 400)


def test_loss_only_on_what_the_assistant_says(mixed, tokenizer):
    cfg = config({"chat": {**mixed["chat"], "epochs": 1}}, packing="best_fit")
    batches, _ = take(build_dataset(cfg, tokenizer, seq_len=128, batch_size=2, seed=0))
    said = []
    for s in segments(batches):
        text, open_ = "", False
        for target, on in zip(s["targets"].tolist(), s["loss_mask"].tolist(), strict=True):
            if on:
                text += "</s>" if target == tokenizer.eos_id else tokenizer.decode([target])
            elif open_:
                text += "|"
            open_ = bool(on)
        said.append(text)
    assert len(said) == 30
    for text in said:
        first, second = text.split("</s>|")[:2]
        i = first.removeprefix("first")
        assert second.startswith(f"second{i} ")
        assert second.rstrip("|").endswith("</s>")
