"""Tokenised folders: the same batches as from text, resumable, and whole or refused."""

import json
import shutil
from itertools import islice

import numpy as np
import pytest
from batch_rows import same, write_jsonl

from data import DataConfig, build_dataset, closing
from data.near_duplicates import find_near_duplicates
from data.pipeline import open_encoders
from data.tokenize import check_folder, tokenize_source
from laneformer_jax import settings
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import train_tokenizer

SIZES = {"seq_len": 48, "batch_size": 2, "seed": 3}


def config(**fields):
    plain = {"prefetch_batches": 0, "read_threads": 0}
    return settings.from_dict(DataConfig, {"sources": {"text": fields}, **plain})


def take(cfg, tokenizer, n):
    with closing(build_dataset(cfg, tokenizer, **SIZES)) as batches:
        return list(islice(batches, n))


@pytest.fixture(params=["text", "chat"])
def source(request, corpora):
    fields = {"kind": "jsonl", "path": str(corpora / f"{request.param}.jsonl")}
    return fields if request.param == "text" else {**fields, "format": "messages"}


@pytest.fixture
def written(source, tokenizer, tmp_path):
    folder = tmp_path / "out"
    manifest = tokenize_source("text", config(**source), tokenizer, folder, documents_per_shard=40)
    return folder, manifest


def read(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_batches_equal_those_from_text(source, written, tokenizer):
    folder, manifest = written
    assert manifest["dtype"] == "uint16"
    tokenised = config(kind="tokenized", path=str(folder))
    for a, b in zip(
        take(tokenised, tokenizer, 25), take(config(**source), tokenizer, 25), strict=True
    ):
        assert same(a, b)
    assert check_folder(folder) == len(manifest["shards"]) * (3 + manifest["masked"])


def test_a_stopped_run_goes_on_and_writes_the_same_bytes(source, written, tokenizer, tmp_path):
    folder, manifest = written
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    (half / "manifest.json").unlink()
    last = manifest["shards"][-1]["name"]
    (half / f"{last}.json").unlink()
    (half / f"{last}.tokens").write_bytes(b"half")
    with pytest.raises(
        UserError, match=r"holds no manifest\.json; .*has not finished: run it again"
    ):
        take(config(kind="tokenized", path=str(half)), tokenizer, 1)
    tokenize_source("text", config(**source), tokenizer, half, documents_per_shard=40)
    assert read(half) == read(folder)


def test_worker_processes_write_the_same_bytes(source, written, tokenizer, tmp_path):
    folder, _ = written
    other = tmp_path / "workers"
    tokenize_source(
        "text", config(**source), tokenizer, other, documents_per_shard=40, num_workers=2
    )
    assert read(other) == read(folder)


def test_other_settings_or_foreign_folders_are_refused(source, written, tokenizer, tmp_path):
    folder, _ = written
    before = read(folder)
    with pytest.raises(
        UserError, match=r"begun with other settings \(documents_per_shard differ\)"
    ):
        tokenize_source("text", config(**source), tokenizer, folder, documents_per_shard=41)
    assert read(folder) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="exists and is not empty"):
        tokenize_source("text", config(**source), tokenizer, tmp_path / "mine")


def test_damaged_folders_are_refused(written, tokenizer, tmp_path):
    folder, manifest = written
    tokenised = config(kind="tokenized", path=str(folder))
    name = f"{manifest['shards'][0]['name']}.tokens"
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-2])
    with pytest.raises(UserError, match=rf"shard {name} has {len(whole) - 2} bytes, {len(whole)}"):
        take(tokenised, tokenizer, 1)
    (folder / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(UserError, match=rf"{name}: its checksum differs"):
        check_folder(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"shard {name} is missing"):
        take(tokenised, tokenizer, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"format": 1, "dtype":', "manifest.json cannot be read"),
        ("[]", "manifest.json must hold a JSON object"),
        ("{}", "has format None; this version reads 1"),
        ('{"format": 1, "shards": []}', "lacks tokenizer_sha256, dtype, masked"),
    ],
)
def test_bad_manifests_are_refused(tmp_path, tokenizer, text, found):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=f"source 'text': {tmp_path}: .*{found}"):
        take(config(kind="tokenized", path=str(tmp_path)), tokenizer, 1)


def test_another_tokenizer_is_refused(written, tmp_path):
    folder, _ = written
    other = train_tokenizer(["other words and more"] * 3, 275, tmp_path / "other")
    with pytest.raises(
        UserError, match=r"was tokenised with tokenizer [0-9a-f]{12}, the model's is"
    ):
        take(config(kind="tokenized", path=str(folder)), other, 1)


def test_held_out_documents_are_not_written(corpora, tokenizer, tmp_path):
    fields = {"kind": "jsonl", "path": str(corpora / "text.jsonl"), "heldout": 0.3}
    manifest = tokenize_source("text", config(**fields), tokenizer, tmp_path / "out")
    (encoder,) = open_encoders(config(**fields), tokenizer, "train", None)
    assert manifest["documents"] == len(encoder.source) < 150


def test_large_vocabularies_take_32_bits(source, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "vocab_size", 70_000)
    manifest = tokenize_source("text", config(**source), tokenizer, tmp_path / "wide")
    assert manifest["dtype"] == "uint32"
    tokens = np.fromfile(tmp_path / "wide" / "shard-00000.tokens", "uint32")
    assert tokens[0] == tokenizer.bos_id
    assert take(config(kind="tokenized", path=str(tmp_path / "wide")), tokenizer, 1)


def near(tmp_path, tokenizer, texts, threshold=0.7):
    write_jsonl(tmp_path / "near.jsonl", [{"text": t} for t in texts])
    cfg = config(kind="jsonl", path=str(tmp_path / "near.jsonl"))
    (encoder,) = open_encoders(cfg, tokenizer, "train", None)
    return find_near_duplicates(encoder, threshold)


def test_near_duplicates(tmp_path, tokenizer):
    base = " ".join(f"word{i}" for i in range(200))
    texts = [base, base.replace("word100 ", "changed "), " ".join(f"other{i}" for i in range(200))]
    assert near(tmp_path, tokenizer, [*texts, "too short"]) == [1]
    assert near(tmp_path, tokenizer, [texts[0], texts[2]]) == []
    assert near(tmp_path, tokenizer, texts[::-1]) == [2]
    with pytest.raises(UserError, match=r"near_duplicates = 1\.5: must be from 0\.1 to 0\.95"):
        near(tmp_path, tokenizer, texts, threshold=1.5)


def test_near_duplicates_are_left_out_of_shards(tmp_path, tokenizer):
    base = " ".join(f"word{i}" for i in range(100))
    write_jsonl(tmp_path / "x.jsonl", [{"text": base}, {"text": base + " more"}, {"text": base}])
    cfg = config(kind="jsonl", path=str(tmp_path / "x.jsonl"))
    manifest = tokenize_source("text", cfg, tokenizer, tmp_path / "out", near_duplicates=0.8)
    assert manifest["documents"] == 1
    assert manifest["skipped"] == {"exact_duplicate": 1, "near_duplicate": 1}
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
