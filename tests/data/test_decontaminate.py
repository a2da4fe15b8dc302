"""Overlap with the benchmarks: 13 words in a row, no fewer."""

import pickle
import re

import pytest
from batch_rows import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataConfig, build_dataset, closing, counts
from data import decontaminate as module
from data.decontaminate import Benchmarks, N, ngram_hashes
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


def test_the_shipped_benchmarks(shared):
    import gzip
    import json

    shipped = Benchmarks.load()
    for name, field in (("HumanEvalPlus-OriginFmt", "prompt"), ("MbppPlus-OriginFmt", "code")):
        lines = gzip.decompress((shared / "evaldata" / f"{name}.jsonl.gz").read_bytes())
        rows = [json.loads(line) for line in lines.splitlines()]
        long = [r for r in rows if len(words(r[field])) >= N]
        assert len(long) > 0.6 * len(rows)
        assert all(shipped.overlap(r[field]) for r in long)


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
