"""A run that is killed at any moment ends with the same losses, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laneformer_jax.tokenizer import train_tokenizer
from train.metrics import read_jsonl

CONFIG = """
model:
  preset: tiny
  overrides:
    vocab_size: 320
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 3
    sliding_window: 8
    swa_layers: [0]
    max_position_embeddings: 32
tokenizer: {folder}/tokenizer.model
data:
  sources:
    a: {{kind: text, path: {folder}/texts, heldout: 0.2}}
    b: {{kind: jsonl, path: {folder}/rows.jsonl, weight: 0.5}}
train: {{steps: {steps}, batch_size: 4, seq_len: 16, accumulate: 2}}
schedule: {{warmup_steps: 3, decay_steps: 5}}
checkpoint: {{interval: 3}}
eval: {{interval: 7, batches: 2}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    rng = random.Random(0)
    words = [f"word{i}" for i in range(60)]
    (folder / "texts").mkdir()
    texts = [" ".join(rng.choices(words, k=40)) + "\n" for _ in range(40)]
    for i, text in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_text(text)
    rows = [json.dumps({"text": " ".join(rng.choices(words, k=30))}) for _ in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    train_tokenizer(texts, 280, folder / "tokenizer.model")
    return folder


def write_config(folder: Path, steps: int) -> Path:
    path = folder / f"config{steps}.yaml"
    path.write_text(CONFIG.format(folder=folder, steps=steps))
    return path


def start(config: Path, out: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "laneformer_jax", "train", "--config", str(config)]
    return subprocess.Popen(
        [*command, "--out", str(out), *more],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def results(out: Path) -> list[dict]:
    """The metrics without those that depend on the clock."""
    timed = {"tokens_per_s", "model_flops_per_s", "data_wait"}
    return [
        {k: v for k, v in r.items() if k not in timed} for r in read_jsonl(out / "metrics.jsonl")
    ]


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    while process.poll() is None:
        if any(r["step"] >= step for r in read_jsonl(out / "metrics.jsonl")):
            return
        time.sleep(0.01)


def kill_and_resume(folder: Path, steps: int, kills: int, seed: int) -> None:
    config = write_config(folder, steps)
    finish(start(config, folder / f"whole{seed}"))
    rng = random.Random(seed)
    out = folder / f"killed{seed}"
    for i in range(kills):
        process = start(config, out)
        wait_for_step(out, (i + 1) * steps // (kills + 1), process)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finish(start(config, out))
    whole = results(folder / f"whole{seed}")
    assert [r["step"] for r in whole if "loss" in r] == list(range(1, steps + 1))
    assert results(out) == whole
    finish(start(config, out))  # complete: changes nothing
    assert results(out) == whole
    assert not list((out / "checkpoints").glob("*tmp*"))


def test_two_kills_change_nothing(folder):
    kill_and_resume(folder, steps=30, kills=2, seed=0)


@pytest.mark.slow
def test_ten_kills_change_nothing(folder):
    kill_and_resume(folder, steps=150, kills=10, seed=1)


def test_sigterm_saves_and_exits_with_143(folder):
    config = write_config(folder, 5000)
    out = folder / "terminated"
    process = start(config, out)
    wait_for_step(out, 4, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    last = results(out)[-1]["step"]
    assert f"saved step {last}" in output
    assert (out / "checkpoints" / str(last) / "MANIFEST.json").exists()
