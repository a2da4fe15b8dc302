"""The quickstart, all of it, at a few steps a phase."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laneformer_jax import Laneformer
from laneformer_jax.checkpoint.load import load_checkpoint
from train.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[2]


def laneformer(*args, cwd):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-m", "laneformer_jax", *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("quickstart")
    done = laneformer("quickstart", "--out", "qs", "--scale", "0.02", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "qs", done


def test_every_phase_made_every_step_once_through_a_stop_and_a_resume(quickstart):
    out, done = quickstart
    for phase, steps in (("pretrain", 7), ("midtrain", 4), ("sft", 4)):
        records = read_jsonl(out / phase / "metrics.jsonl")
        assert [r["step"] for r in records if "loss" in r] == list(range(1, steps + 1))
    assert "stopped on purpose at step" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_phases_start_from_one_another(quickstart):
    out, _ = quickstart
    first = {
        phase: next(r["loss"] for r in read_jsonl(out / phase / "metrics.jsonl") if "loss" in r)
        for phase in ("pretrain", "midtrain", "sft")
    }
    assert abs(first["pretrain"] - np.log(4096)) < 0.2  # a new model knows nothing
    assert first["midtrain"] < first["pretrain"] - 0.5
    assert first["sft"] < first["pretrain"] - 0.5


def test_the_export_is_the_trained_model(quickstart):
    out, _ = quickstart
    exported = Laneformer.from_pretrained(out / "hf")
    trained = load_checkpoint(out / "sft").model
    ids = np.arange(24, dtype=np.int32)[None]
    np.testing.assert_array_equal(np.asarray(exported(ids)), np.asarray(trained(ids)))
    assert json.loads((out / "hf" / "config.json").read_text())["num_lanes"] == 8
    assert (out / "hf" / "tokenizer.model").exists()


def test_the_report_holds_the_losses_and_the_samples(quickstart):
    out, done = quickstart
    page = (out / "report.html").read_text()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for phase in ("pretrain", "midtrain", "sft"):
        held_out = [r for r in read_jsonl(out / phase / "metrics.jsonl") if "eval_loss" in r][-1]
        assert f"{held_out['eval_loss']:.3f}" in page
        assert f"{held_out['eval_loss']:.3f}" in done.stdout
    assert page.count("<pre><b>") == 2
    assert "def read_lines(path):" in page


def test_generate_reads_a_run(quickstart):
    out, _ = quickstart
    done = laneformer(
        "generate", out / "sft", "--prompt", "def", "--max-new-tokens", "4", "--json", cwd=out
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["prompt_tokens"] == 2
    assert len(record["samples"][0]["tokens"]) <= 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--out", "x", "--scale", "0"), "--scale: 0.0 must be above 0"),
        (("--out", "file"), "--out: file is a file"),
        (("--out", "x", "--scal", "1"), "did you mean '--scale'"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, args, message):
    (tmp_path / "file").write_text("")
    done = laneformer("quickstart", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
