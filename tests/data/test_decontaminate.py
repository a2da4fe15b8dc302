"""Overlap with the benchmarks: 13 words in a row, no fewer."""

import doctest
import gzip
import heapq
import ipaddress
import json
import pickle
import re
from pathlib import Path

import pytest
from batch_rows import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataConfig, build_dataset, closing, counts
from data import decontaminate as module
from data.decontaminate import MIN_NAMES, Benchmarks, N, ngram_hashes
from laneformer_jax import settings as run_settings

texts = st.text(alphabet="aB1_ \n.(é", max_size=120)


def words(text: str) -> list[str]:
    upper = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")
    return re.findall(r"[a-z0-9_\x80-\U0010ffff]+", text.translate(upper))


def sequences(text: str) -> list[tuple[str, ...]]:
    found = words(text)
    return [tuple(found[i : i + N]) for i in range(len(found) - N + 1)]


@settings(max_examples=300, deadline=None)
@given(a=texts, b=texts)
def test_hashes_are_equal_exactly_where_sequences_are(a, b):
    hashes = [*ngram_hashes(a).tolist(), *ngram_hashes(b).tolist()]
    found = [*sequences(a), *sequences(b)]
    assert len(hashes) == len(found)
    assert len(set(hashes)) == len(set(found))
    assert len(dict(zip(found, hashes, strict=True))) == len(set(hashes))


def test_long_texts_are_hashed_in_pieces(monkeypatch):
    text = " ".join(f"w{i}" for i in range(500))
    whole = ngram_hashes(text).tolist()
    monkeypatch.setattr(module, "_PIECE", 64)
    assert ngram_hashes(text).tolist() == whole


def test_thirteen_words_overlap_and_twelve_do_not():
    task = "def f(a, b): return sum of every item in the list that is odd"
    found = Benchmarks.build([("Some/1", task), ("Some/2", task + " or even")])
    thirteen = " ".join(words(task)[2:15])
    assert len(words(thirteen)) == N
    assert found.overlap(f"x {thirteen.upper()}!") == "Some/1"
    assert found.overlap(" ".join(words(task)[2:14])) is None
    assert found.overlap("") is None
    assert pickle.loads(pickle.dumps(found)).overlap(thirteen) == "Some/1"


def names(sequence: tuple[str, ...]) -> int:
    return len({w for w in sequence if len(w.encode()) > 1 and not w.isdigit()})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["0", "12", "a", "a1", "é", "x_", "1a", "9" * 20]), max_size=30))
def test_sequences_without_two_names_are_not_kept(listed):
    text = " ".join(listed)
    kept = [h for h, s in zip(ngram_hashes(text).tolist(), sequences(text), strict=True)
            if names(s) >= MIN_NAMES]  # fmt: skip
    assert set(Benchmarks.build([("Some/1", text)]).hashes.tolist()) == set(kept)


@pytest.fixture(scope="module")
def tasks(shared):
    """Every text of 13 words or more of HumanEval+ and MBPP+: prompts and solutions by themselves."""
    out = []
    for name, fields in (
        ("HumanEvalPlus-OriginFmt", ("prompt", "canonical_solution")),
        ("MbppPlus-OriginFmt", ("prompt", "code")),
        ("mbpp", ("text", "code")),
    ):
        lines = gzip.decompress((shared / "evaldata" / f"{name}.jsonl.gz").read_bytes())
        for row in map(json.loads, lines.splitlines()):
            if name != "mbpp" or 11 <= row["task_id"] <= 510:
                out += [row[field] for field in fields]
    return [text for text in out if any(names(s) >= MIN_NAMES for s in sequences(text))]


def test_every_prompt_and_solution_is_found(tasks):
    shipped = Benchmarks.load()
    assert len(tasks) > 1500
    assert all(map(shipped.overlap, tasks))


def test_what_is_reformatted_or_stands_among_other_code_is_found(tasks):
    shipped = Benchmarks.load()
    for text in tasks:
        other = re.sub(r"[\s(),:]+", lambda m: m[0] + "\t ", text.replace("'", '"')).upper()
        assert shipped.overlap(f"import os\n\n{other}\n# {'the end ' * 20}"), text


def test_what_is_changed_in_one_word_is_found_by_the_rest(tasks):
    shipped = Benchmarks.load()
    long = [t for t in tasks if len(words(t)) >= 2 * N + 1]
    assert len(long) > 500
    for text in long:
        middle = words(text)
        middle[len(middle) // 2] = "replaced"
        assert shipped.overlap(" ".join(middle)), text


def test_the_standard_library_is_not_taken_for_a_benchmark():
    """Its lists of numbers are also in MBPP's tests."""
    shipped = Benchmarks.load()
    sequence = " ".join(map(str, range(20)))
    assert shipped.overlap(sequence) is None
    for module_ in (heapq, doctest, ipaddress):
        assert shipped.overlap(Path(module_.__file__).read_text(encoding="utf-8")) is None


def test_contaminated_documents_are_left_out_and_counted(tmp_path, tokenizer, monkeypatch):
    task = " ".join(f"task{i}" for i in range(20))
    found = Benchmarks.build([("Some/1", task)])
    monkeypatch.setattr(Benchmarks, "load", classmethod(lambda cls: found))
    rows = [{"text": f"clean {i} " + "alpha " * i} for i in range(5)] + [{"text": f"see: {task}!"}]
    write_jsonl(tmp_path / "x.jsonl", rows)
    pairs = [{"prompt": "clean", "response": "yes"}, {"prompt": task, "response": "no"}]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    sources = {
        "text": {"kind": "jsonl", "path": str(tmp_path / "x.jsonl"), "epochs": 1},
        "pairs": {
            "kind": "jsonl",
            "path": str(tmp_path / "pairs.jsonl"),
            "format": "prompt_response",
            "epochs": 1,
        },
    }
    for on in (True, False):
        cfg = run_settings.from_dict(
            DataConfig, {"sources": sources, "decontaminate": on, "prefetch_batches": 0}
        )
        with closing(build_dataset(cfg, tokenizer, seq_len=8, batch_size=1, seed=0)) as batches:
            text = tokenizer.decode([t for b in batches for t in b["tokens"].ravel().tolist()])
            read = counts(batches.get_state())
        assert ("task7" in text) is not on
        assert read["text"].get("skipped_contaminated", 0) == on
        assert read["pairs"].get("skipped_contaminated", 0) == on


@pytest.mark.parametrize("name", ["HumanEval/0", "Mbpp/2", "Mbpp/500"])
def test_tasks_are_named(name):
    assert name in Benchmarks.load().tasks
