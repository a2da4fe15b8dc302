"""Batches: deterministic, complete, dealt without overlap, and resumed exactly."""

import json
from collections import Counter

import pytest
from batch_rows import check, config_of, names, pairs, same, segments, take
from hypothesis import given, settings
from hypothesis import strategies as st

from data import (
    build_dataset,
    counts,
    merge_states,
)
from laneformer_jax.errors import UserError

SIZES = {"seq_len": 32, "batch_size": 4, "seed": 3}


@pytest.mark.smoke
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_resumes_exactly_twice_into_fresh_iterators(mixed, tokenizer, packing):
    cfg = config_of(mixed, packing=packing, packing_bins=6)
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
    cfg = config_of(
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
    cfg = config_of(finite, packing=packing, packing_bins=6)
    make = lambda: build_dataset(cfg, tokenizer, seq_len=64, batch_size=3, seed=1)  # noqa: E731
    whole, end = take(make())
    assert take(make(), state=end)[0] == []
    for cut in (*range(1, len(whole), 20), len(whole) - 1):
        first, state = take(make(), cut)
        rest, _ = take(make(), state=state)
        assert len(first) + len(rest) == len(whole)
        assert all(map(same, first + rest, whole))


def test_counts_tell_what_was_read(mixed, tokenizer):
    _, state = take(build_dataset(config_of(mixed), tokenizer, **SIZES), 200)
    read = counts(state)
    total = sum(c["tokens"] for c in read.values())
    # What waits in a packer is counted only when its row is out.
    assert 0 <= 200 * 4 * 32 - total < 1000
    for name, share in (("code", 0.5), ("text", 0.3), ("chat", 0.2)):
        assert read[name]["tokens"] == pytest.approx(share * total, abs=150)
        assert read[name]["bytes"] > 0.9 * read[name]["tokens"]


def test_the_state_is_small_json(mixed, tokenizer):
    _, state = take(build_dataset(config_of(mixed), tokenizer, **SIZES), 5)
    assert len(json.dumps(state)) < 2500


def test_seeds_and_epochs_shuffle_anew(corpora, tokenizer):
    source = {"kind": "jsonl", "path": str(corpora / "text.jsonl"), "epochs": 2}
    orders = []
    for seed in (1, 2):
        # One row that holds both epochs.
        batches, _ = take(
            build_dataset(
                config_of({"text": source}), tokenizer, seq_len=60000, batch_size=1, seed=seed
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
    cfg = config_of({"text": source}, packing="best_fit", packing_bins=2)
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
    cfg = config_of(mixed, num_shards=8)

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
    cfg = config_of(mixed)

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
            config_of(sources),
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
    _, state = take(build_dataset(config_of(sources), tokenizer, **SIZES), 1)
    (tmp_path / "b.txt").write_text("beta")
    with pytest.raises(UserError, match="documents of source text: 1 then, 2 now"):
        take(build_dataset(config_of(sources), tokenizer, **SIZES), 1, state)


def test_processes_see_different_rows(mixed, tokenizer):
    parts = [
        take(
            build_dataset(config_of(mixed), tokenizer, **SIZES, process_index=p, process_count=2), 4
        )[0]
        for p in range(2)
    ]
    assert all(len(b["tokens"]) == 2 for part in parts for b in part)
    assert not any(map(same, *parts))


def test_finished_sources_end_every_process_alike(tmp_path, tokenizer):
    """One document, three processes: those without keep pace with padding instead of hanging."""
    (tmp_path / "a.txt").write_text("text0. alpha")
    cfg = config_of({"text": {"kind": "text", "path": str(tmp_path), "epochs": 1}})
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
        build_dataset(config_of(mixed), tokenizer, **SIZES, process_count=3)
    with pytest.raises(
        UserError, match="num_shards = 4: must be a multiple of the number of processes, 3"
    ):
        build_dataset(config_of(mixed, num_shards=4), tokenizer, **SIZES, process_count=3)
    with pytest.raises(UserError, match="no source is given"):
        build_dataset(config_of({}), tokenizer, **SIZES)


def test_a_source_without_a_usable_document_ends_the_run(mixed, tokenizer):
    """Every conversation is cut before its first label: an error, not a loop."""
    cfg = config_of(mixed, packing="best_fit")
    with pytest.raises(
        UserError, match=r"source 'chat': none of its documents can be used \(no_label"
    ):
        take(build_dataset(cfg, tokenizer, seq_len=4, batch_size=1, seed=0), 400)


def test_loss_only_on_what_the_assistant_says(mixed, tokenizer):
    cfg = config_of({"chat": {**mixed["chat"], "epochs": 1}}, packing="best_fit")
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
