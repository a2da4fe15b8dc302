"""Every kind of source: its documents, its order, what bad input gets."""

import gzip
import json
import pickle
import re

import numpy as np
import pytest
import zstandard
from batch_rows import write_jsonl

from data.config import DataConfig, SourceConfig
from data.sources import BadDocument
from data.sources.names import hash_rows
from data.sources.opening import open_source
from laneformer_jax import settings
from laneformer_jax.errors import UserError


def texts(source, field="text"):
    return [source[i][field] for i in range(len(source))]


def opened(part="all", deduplicate=False, cache_dir=None, **fields):
    return open_source("src", SourceConfig(**fields), part, deduplicate, cache_dir)


def test_text_files_keep_their_bytes_and_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.py").write_text("hidden")
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfx\r\n\ty\0")
    (tmp_path / "b" / "c.py").write_bytes("é".encode())
    (tmp_path / "n.md").write_text("no")
    source = opened(kind="text", path=str(tmp_path), pattern="*.py")
    assert texts(source) == ["\ufeffx\r\n\ty\0", "é"]
    assert source.where(1) == str(tmp_path / "b" / "c.py")
    assert texts(opened(kind="text", path=str(tmp_path / "**" / "*.py"))) == texts(source)
    both = opened(kind="text", path=[str(tmp_path / "n.md"), str(tmp_path / "a.py")])
    assert texts(both) == ["no", "\ufeffx\r\n\ty\0"]
    assert texts(pickle.loads(pickle.dumps(source))) == texts(source)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_json_lines(tmp_path, ending):
    lines = '{"text": "a"}\n\n{"text": "b\\n\u2581"}\r\n\n{"text": "c"}'
    path = tmp_path / f"x.jsonl{ending}"
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[ending]
    path.write_bytes(pack(lines.encode()))
    source = opened(kind="jsonl", path=str(path), cache_dir=str(tmp_path / "cache"))
    assert texts(source) == ["a", "b\n\u2581", "c"]
    assert source.where(1) == f"{path}:3"
    assert texts(pickle.loads(pickle.dumps(source))) == texts(source)


def test_large_files_keep_their_index(tmp_path, monkeypatch):
    from data.sources import jsonl

    monkeypatch.setattr(jsonl, "_INDEX_KEPT_FROM", 1)
    monkeypatch.setattr(jsonl, "_BLOCK", 7)  # lines that cross blocks, blocks that end at lines
    write_jsonl(tmp_path / "x.jsonl", [{"text": "ab" * i} for i in range(20)])
    fields = {"kind": "jsonl", "path": str(tmp_path / "x.jsonl")}
    make = lambda: opened(cache_dir=str(tmp_path / "c"), **fields)  # noqa: E731
    assert texts(make()) == ["ab" * i for i in range(20)]
    monkeypatch.setattr(jsonl, "_scan", None)
    assert texts(make()) == ["ab" * i for i in range(20)]


def test_parquet(hub):
    source = opened(kind="parquet", path=str(hub / "acme"), pattern="train-*.parquet")
    assert len(source) == 21
    assert texts(source)[:2] == ["text00. alpha beta", "text01. alpha beta"]


def test_array_record(tmp_path):
    from array_record.python import array_record_module as ar

    for name, rows in (("a", 3), ("b", 2)):
        writer = ar.ArrayRecordWriter(str(tmp_path / f"{name}.array_record"), "group_size:1")
        for i in range(rows):
            writer.write(json.dumps({"text": f"{name}{i}"}).encode())
        writer.close()
    source = opened(kind="array_record", path=str(tmp_path))
    assert texts(source) == ["a0", "a1", "a2", "b0", "b1"]
    assert texts(pickle.loads(pickle.dumps(source))) == texts(source)
    assert source.where(4) == f"{tmp_path / 'b.array_record'}, record 1"
    data = (tmp_path / "a.array_record").read_bytes()
    (tmp_path / "a.array_record").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"source 'src': .*a\.array_record: is not a complete"):
        opened(kind="array_record", path=str(tmp_path))


def test_hub_by_name_offline(hub):
    source = opened(kind="hub", path="acme/docs")
    assert len(source) == 21
    assert opened(kind="hub", path="acme/docs", split="test")[0]["text"] == "text999. x"
    assert texts(pickle.loads(pickle.dumps(source))) == texts(source)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"path": "acme/docs", "split": "tran"}, r"acme/docs: split = 'tran': .*Should be one of"),
        ({"path": "acme/nosuch"}, "acme/nosuch: not on this machine, and the Hub was not reached"),
        ({"path": "acme/docs", "config_name": "x"}, "config_name = 'x': .*not found"),
        (
            {"path": "acme/docs", "text_field": "txt"},
            r"has no column 'txt' \(did you mean 'text'\?\)",
        ),
        ({"path": "acme/script"}, "needs its own code to be run, which is never done"),
    ],
)
def test_hub_errors_are_one_line(hub, fields, found):
    script = hub / "acme" / "script"
    script.mkdir()
    (script / "script.py").write_text(f"open({str(hub / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match=found) as caught:
        opened(kind="hub", **fields)
    assert str(caught.value).startswith("source 'src': acme/")
    assert "\n" not in str(caught.value)
    assert not (hub / "ran").exists()


def test_the_standard_library_and_its_functions():
    files = opened(kind="stdlib")
    names = [files.where(i) for i in range(len(files))]
    assert any(n.endswith("json/decoder.py") for n in names)
    assert not any("site-packages" in n or "/test/" in n for n in names)
    assert names == sorted(names, key=lambda n: n.split("lib/python", 1)[-1])
    pairs = opened(kind="stdlib_pairs")
    found = {pairs[i]["prompt"]: pairs[i] for i in range(len(pairs))}
    prompt = next(p for p in found if "`bisect_left(" in p and "index where to insert" in p)
    pair = found[prompt]
    assert prompt.startswith(
        "Write a Python function `bisect_left(a, x, lo=0, hi=None, *, key=None)`."
    )
    assert pair["response"].startswith("def bisect_left(a, x, lo=0, hi=None, *, key=None):\n")
    assert pair["text"].startswith("# Write a Python function `bisect_left(")
    compile(pair["text"], "pair", "exec")


def test_held_out_pairs_come_from_held_out_files():
    fields = {"heldout": 0.1}
    files = opened("heldout", kind="stdlib", **fields)
    held = {files.where(i) for i in range(len(files))}
    pairs = opened("heldout", kind="stdlib_pairs", **fields)
    assert len(pairs) > 50
    for i in range(len(pairs)):
        name = pairs.where(i).rsplit(":", 1)[0]
        assert any(h.endswith("/" + name) for h in held)


def test_splits_are_stable_complete_and_nested(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", [{"text": str(i)} for i in range(500)])
    fields = {"kind": "jsonl", "path": str(tmp_path / "x.jsonl")}
    small = set(texts(opened("heldout", heldout=0.1, **fields)))
    large = set(texts(opened("heldout", heldout=0.3, **fields)))
    train = set(texts(opened("train", heldout=0.3, **fields)))
    assert small < large
    assert not large & train
    assert len(large | train) == 500
    assert 110 < len(large) < 190
    # A file that grows keeps what it held out.
    write_jsonl(tmp_path / "x.jsonl", [{"text": str(i)} for i in range(700)])
    assert large < set(texts(opened("heldout", heldout=0.3, **fields)))
    hashes = hash_rows("x", np.arange(100_000))
    assert len(np.unique(hashes)) == 100_000


def test_exact_repeats_are_left_out_once(tmp_path):
    for name, text in {
        "a": "x = 1",
        "b": "y = 1",
        "c": "x = 1",
        "d": "longer",
        "e": "y = 1",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    source = opened(deduplicate=True, kind="text", path=str(tmp_path), pattern="*.py")
    assert texts(source) == ["x = 1", "y = 1", "longer"]
    assert source.duplicates == 2
    rows = [{"text": "a", "id": 1}, {"text": "b", "id": 2}, {"text": "a", "id": 3}]
    write_jsonl(tmp_path / "x.jsonl", rows)
    fields = {"kind": "jsonl", "path": str(tmp_path / "x.jsonl")}
    assert texts(opened(deduplicate=True, **fields), "id") == [1, 2]
    assert texts(opened(deduplicate=False, **fields), "id") == [1, 2, 3]


def test_text_hashes_of_large_sources_are_kept(tmp_path, monkeypatch):
    from data.sources import opening

    monkeypatch.setattr(opening, "_CACHED_FROM", 1)
    write_jsonl(tmp_path / "x.jsonl", [{"text": str(i % 7)} for i in range(20)])
    fields = {"kind": "jsonl", "path": str(tmp_path / "x.jsonl")}
    make = lambda: opened(deduplicate=True, cache_dir=str(tmp_path / "c"), **fields)  # noqa: E731
    assert len(make()) == 7
    monkeypatch.setattr(opening, "text_hash", None)
    assert len(make()) == 7


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "\xff"}', "undecodable", "byte 10: not UTF-8 text"),
        (b'{"text": ', "malformed", "not valid JSON"),
        (b"[1, 2]", "malformed", "must be an object, not an array"),
        (b"[" * 100_000 + b"]" * 100_000, "malformed", "JSON nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "malformed", "JSON with a number too long to read"),
    ],
)
def test_bad_lines_name_their_place(tmp_path, line, reason, detail):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    source = opened(kind="jsonl", path=str(path))
    with pytest.raises(BadDocument, match=re.escape(f"{path}:2: {detail}")) as caught:
        source[1]
    assert caught.value.reason == reason


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_cut_off_archives_are_refused(tmp_path, ending):
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[ending]
    data = pack("".join(f'{{"text": "{i * 7919}"}}\n' for i in range(5000)).encode())
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"source 'src': .*: cannot be unpacked"):
        opened(kind="jsonl", path=str(path), cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"kind": "text"}, r"path: required for a source of kind 'text'"),
        ({"kind": "txt", "path": "x"}, r"did you mean 'text'"),
        ({"kind": "text", "path": "x", "weight": 0}, r"weight = 0.0: must be a positive number"),
        ({"kind": "text", "path": "x", "weight": -1}, r"weight = -1.0: must be a positive"),
        ({"kind": "text", "path": "x", "weight": "much"}, r"weight = 'much'"),
        ({"kind": "text", "path": "x", "epochs": 0}, r"epochs = 0: must be at least 1"),
        (
            {"kind": "text", "path": "x", "heldout": 1.0},
            r"heldout = 1.0: must be at least 0 and below",
        ),
        (
            {"kind": "text", "path": "x", "split": "test"},
            r"split: a source of kind 'text' has no such",
        ),
        (
            {"kind": "text", "path": "x", "wieght": 1},
            r"wieght: unknown field \(did you mean 'weight'",
        ),
        ({"kind": "hub", "path": ["a", "b"]}, r"path = \['a', 'b'\]: must be one name"),
    ],
)
def test_bad_settings_name_source_field_and_value(fields, found):
    with pytest.raises(UserError, match=found) as caught:
        settings.from_dict(DataConfig, {"sources": {"mine": fields}})
    assert "sources.mine" in str(caught.value)


def test_nothing_to_read_is_an_error(tmp_path):
    for path in (tmp_path / "nosuch", tmp_path):
        with pytest.raises(UserError, match="source 'src'"):
            opened(kind="text", path=str(path))
    (tmp_path / "x.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no documents"):
        opened(kind="jsonl", path=str(tmp_path / "x.jsonl"))
