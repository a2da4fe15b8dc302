"""`laneformer tokenizer` and `laneformer data` as they are typed."""

import json

import pytest
import yaml

from data import DataConfig
from data.report import measure, table
from laneformer_jax import settings
from laneformer_jax.cli import main
from laneformer_jax.tokenizer import Tokenizer


@pytest.fixture
def mixture(corpora, tmp_path):
    sources = {
        "code": {"kind": "text", "path": str(corpora / "code"), "weight": 3},
        "pairs": {
            "kind": "jsonl",
            "path": str(corpora / "pairs.jsonl"),
            "format": "prompt_response",
        },
    }
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump({"data": {"sources": sources, "packing": "best_fit"}}))
    return str(path)


def test_tokenizer_train_and_stats(corpora, mixture, tmp_path, capsys):
    out = str(tmp_path / "tok")
    code = str(corpora / "code")
    assert main(["tokenizer", "train", code, "--vocab-size", "300", "--out", out]) == 0
    assert "300 tokens, sha256" in capsys.readouterr().out
    assert Tokenizer.load(out).vocab_size == 300
    assert main(["tokenizer", "stats", out, code]) == 0
    shown = capsys.readouterr().out
    assert "documents       40" in shown
    assert "40 of 40 round trips" in shown
    arguments = ["--config", mixture, "--vocab-size", "300", "--out", str(tmp_path / "two")]
    assert main(["tokenizer", "train", *arguments]) == 0


def test_report(mixture, tokenizer, tmp_path, capsys):
    where = str(tokenizer.save(tmp_path))
    out = tmp_path / "report"
    arguments = [mixture, "--tokenizer", where, "--seq-len", "64", "--out", str(out)]
    assert main(["data", "report", *arguments]) == 0
    shown = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    code, pairs = report["sources"]["code"], report["sources"]["pairs"]
    assert code["documents"] == 40
    assert code["share"] == 0.75
    assert code["tokens_share"] + pairs["tokens_share"] == pytest.approx(1)
    assert sum(code["lengths"].values()) == 40
    assert pairs["longest"] <= 64
    assert f"{code['tokens']:,}" in shown
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "report.txt").read_text() in shown


def test_a_report_follows_the_schedule(corpora, tokenizer):
    """From code alone to text alone in a straight line over 50 M tokens."""
    config = settings.from_dict(
        DataConfig,
        {
            "sources": {
                "code": {"kind": "text", "path": str(corpora / "code")},
                "text": {"kind": "jsonl", "path": str(corpora / "text.jsonl")},
            },
            "schedule": [
                {"tokens": 0, "weights": {"code": 1}},
                {"tokens": 50_000_000, "weights": {"text": 1}},
            ],
        },
    )
    report = measure(config, tokenizer, 64)
    code, text = report["sources"]["code"], report["sources"]["text"]
    assert (code["share"], code["final_share"]) == (1, 0)
    assert (text["share"], text["final_share"]) == (0, 1)
    assert code["epochs_100m"] == pytest.approx(25e6 / code["tokens"], rel=0.01)
    assert text["epochs_100m"] == pytest.approx(75e6 / text["tokens"], rel=0.01)
    assert "100.0% to 0.0%" in table(report)


def test_tokenize_and_check(mixture, tokenizer, tmp_path, capsys):
    where, out = str(tokenizer.save(tmp_path)), str(tmp_path / "shards")
    arguments = [mixture, "--tokenizer", where, "--out", out]
    assert main(["data", "tokenize", *arguments]) == 2
    assert "--source: required; the config has code, pairs" in capsys.readouterr().err
    assert main(["data", "tokenize", *arguments, "--source", "cod"]) == 2
    assert "did you mean 'code'" in capsys.readouterr().err
    assert main(["data", "tokenize", *arguments, "--source", "code"]) == 0
    assert "40 documents" in capsys.readouterr().out
    assert main(["data", "check", out]) == 0
    assert "files are as they were written" in capsys.readouterr().out


def test_errors_are_one_line(mixture, tmp_path, capsys):
    for arguments, found in {
        ("tokenizer", "train", "--out", "x"): "give either text files or --config",
        ("data", "check", str(tmp_path)): "holds no manifest.json",
        ("data", "report", mixture, "--tokenizer", "nosuch"): "nosuch: no such tokenizer file",
        (
            "data",
            "report",
            mixture,
            "sources.code.wieght=2",
            "--tokenizer",
            "x",
        ): "did you mean 'weight'",
    }.items():
        assert main(list(arguments)) == 2
        err = capsys.readouterr().err
        assert found in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
