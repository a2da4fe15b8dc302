"""Benchmarks beside training: scores in the metrics, and nothing that can stop a run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laneformer_jax import settings
from laneformer_jax.checkpoint.training import TrainingCheckpoints
from laneformer_jax.errors import UserError
from train import RunConfig
from train.benchmarks import SECONDS
from train.loop import train
from train.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
TEST = """
def is_floats(x) -> bool:
    # check if it is float; List[float]; Tuple[float]
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False


def assertion(out, exp, atol):
    exact_match = out == exp

    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match


def check(candidate):
    inputs = [[1], [2]]
    results = [1, 4]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Two tasks in the schema of HumanEval+; the second is solved by what comes after the prompt."""
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    row = {"entry_point": "f", "test": TEST}
    rows = [
        {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x * x\n"},
        {"task_id": "HumanEval/1", "prompt": "def f(x):\n    return x * x\n", "canonical_solution": "\n"},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r | row) + "\n" for r in rows))
    return path


def config_of(corpus: Path, *overrides: str) -> RunConfig:
    sizes = dict(vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
    config = {
        "model": {"preset": "tiny", "overrides": {**sizes, "max_position_embeddings": 128}},
        "tokenizer": str(corpus / "tokenizer.model"),
        "data": {"sources": {"a": {"kind": "text", "path": str(corpus / "texts")}}},
        "train": {"steps": 4, "batch_size": 4, "seq_len": 16},
        "optimizer": {"learning_rate": 1e-9},
        "checkpoint": {"interval": 100, "keep": 1},
    }
    return settings.replace(settings.from_dict(RunConfig, config), overrides)


def benchmarks(out: Path) -> list[dict]:
    return [r for r in read_jsonl(out / "metrics.jsonl") if SECONDS in r]


def test_checkpoints_are_scored_beside_training(corpus, tasks, tmp_path):
    """Every second step; the scores carry the step of the checkpoint, and a resume adds none."""
    out = tmp_path / "run"
    asked = [
        "benchmarks.interval=2",
        f"benchmarks.suites=[humaneval+={tasks}]",
        "benchmarks.max_new_tokens=4",
    ]
    assert train(config_of(corpus, *asked), out).exit_code == 0
    found = benchmarks(out)
    # Step 2 was held although only the newest checkpoint is kept.
    assert [r["step"] for r in found] == [2, 4]
    for record in found:
        # Random weights: only the task whose prompt is the solution is solved, in spite of them.
        assert record["humaneval+/base/pass@1"] == record["humaneval+/plus/pass@1"] == 0.5
        assert record[SECONDS] > 0
        results = json.loads(
            (out / "evaluations" / str(record["step"]) / "results.json").read_text()
        )
        assert results["settings"]["checkpoint"] == str(out / "checkpoints" / str(record["step"]))
        assert results["settings"]["max_new_tokens"] == 4
    losses = [r["step"] for r in read_jsonl(out / "metrics.jsonl") if "loss" in r]
    assert losses == [1, 2, 3, 4]
    # All scores are there: nothing is evaluated again.
    assert train(config_of(corpus, *asked), out).step == 4
    assert benchmarks(out) == found


def test_an_evaluation_that_fails_stops_nothing(corpus, tmp_path):
    out = tmp_path / "run"
    asked = ["benchmarks.interval=4", f"benchmarks.suites=[humaneval+={tmp_path / 'nowhere'}]"]
    with pytest.warns(UserWarning, match=r"benchmarks of step 4 failed, training goes on: error: "):
        result = train(config_of(corpus, *asked), out)
    assert (result.step, result.exit_code) == (4, 0)
    assert benchmarks(out) == []
    assert len([r for r in read_jsonl(out / "metrics.jsonl") if "loss" in r]) == 4


@pytest.mark.slow
def test_what_an_earlier_process_left_is_taken_up(corpus, tasks, tmp_path):
    """A killed trainer takes its evaluation along; the next process makes up for it."""
    out = tmp_path / "run"
    config = tmp_path / "config.yaml"
    asked = [f"benchmarks.suites=[humaneval+={tasks}]", "benchmarks.max_new_tokens=4"]
    config.write_text(settings.to_yaml(config_of(corpus, "benchmarks.interval=3", *asked)))
    command = [sys.executable, "-m", "laneformer_jax", "train"]
    command += ["--config", str(config), "--out", str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    trainer = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (out / "evaluations").exists():
        assert trainer.poll() is None
        time.sleep(0.02)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 10
    while evaluations_of(out):
        assert time.monotonic() < deadline, "the evaluation outlived its trainer"
        time.sleep(0.02)
    assert benchmarks(out) == []
    (out / "evaluations" / "7").mkdir()  # of an update that is made again
    assert train(settings.load(RunConfig, config), out).step == 4
    assert [r["step"] for r in benchmarks(out)] == [3, 4]
    assert sorted(p.name for p in (out / "evaluations").iterdir()) == ["3", "4"]


def evaluations_of(out: Path) -> list[str]:
    """Processes that evaluate checkpoints of a run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if "eval.inloop" in command and str(out) in command and state != "Z":
            found.append(folder.name)
    return found


def test_a_held_checkpoint_stays(tmp_path):
    import jax.numpy as jnp

    from laneformer_jax.presets import preset

    checkpoints = TrainingCheckpoints(tmp_path, keep=1)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"norm.weight": jnp.ones(2)}, {"n": jnp.ones(1)}, preset("tiny"), {})
        checkpoints.wait()
        if step == 1:
            checkpoints.held.add(1)
        if step == 3:
            assert checkpoints.steps() == [1, 3]
            checkpoints.held.discard(1)
    assert checkpoints.steps() == [4]
    checkpoints.close()


def test_an_unknown_suite_is_refused_before_training(corpus):
    with pytest.raises(UserError, match=r"humanevl\+.*did you mean 'humaneval\+'"):
        config_of(corpus, "benchmarks.interval=1", "benchmarks.suites=[humanevl+]")
    with pytest.raises(UserError, match=r"limit = 0: must be at least 1"):
        config_of(corpus, "benchmarks.limit=0")
