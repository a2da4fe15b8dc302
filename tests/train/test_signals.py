"""A signal that comes while the run compiles, evaluates, or waits for data that does not come."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from laneformer_jax import settings
from laneformer_jax.checkpoint import native
from train import RunConfig, batches, loop
from train.batches import Feed
from train.clock import TIMED
from train.loop import train
from train.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
STEPS = 9  # evaluated at 7 and 9, saved at 5


def config_of(corpus: Path) -> RunConfig:
    return settings.load(RunConfig, corpus / "run.yaml", [f"train.steps={STEPS}"])


def results(out: Path) -> list[dict]:
    return [
        {k: v for k, v in r.items() if k not in TIMED} for r in read_jsonl(out / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train(config_of(corpus), out).exit_code == 0
    return results(out)


def signal_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)  # a thread hears it


def compilation(monkeypatch) -> None:
    compile_ = jax.stages.Lowered.compile

    def signalled(lowered, *arguments, **options):
        signal_self()
        return compile_(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", signalled)


def evaluation(monkeypatch) -> None:
    place = loop.place

    def signalled(batch, sharding):
        signal_self()
        return place(batch, sharding)

    monkeypatch.setattr(loop, "place", signalled)


def waiting(monkeypatch) -> None:
    """The fourth batch never comes."""
    monkeypatch.setattr(batches, "_CLOSE_S", 0.5)
    fetch, fetched = Feed._fetch_mine, []

    def signalled(feed):
        fetched.append(feed)
        if len(fetched) > 3:
            signal_self()
            threading.Event().wait()
        return fetch(feed)

    monkeypatch.setattr(Feed, "_fetch_mine", signalled)


@pytest.mark.parametrize(("moment", "last"), [(compilation, 1), (evaluation, 7), (waiting, 3)])
def test_a_signal_at_any_moment_saves(moment, last, whole, corpus, tmp_path, monkeypatch, capsys):
    """And the same command makes of it what it would have been without."""
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        moment(patched)
        result = train(config_of(corpus), out)
    assert (result.exit_code, result.step) == (143, last)
    assert f"saved step {last} in {out}" in capsys.readouterr().err
    assert native.read_metadata(native.find(out))["step"] == last
    assert [r["step"] for r in results(out)] == list(range(1, last + 1))
    assert train(config_of(corpus), out).exit_code == 0
    assert results(out) == whole


def test_workers_that_do_not_answer_do_not_keep_a_run(corpus, workers_of, tmp_path):
    """A process that hangs, as one that reads from a network disk may, and cannot be told to end."""
    out, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "laneformer_jax", "train", "--out", str(out)]
    command += ["--config", str(corpus / "run.yaml"), "train.steps=100000", "data.num_workers=1"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with open(log, "w") as file:
        run = subprocess.Popen(command, env=env, cwd=ROOT, stdout=file, stderr=file)
    until = time.monotonic() + 300

    def logged() -> int:
        return max((r["step"] for r in read_jsonl(out / "metrics.jsonl")), default=0)

    while logged() < 5:
        assert run.poll() is None and time.monotonic() < until, log.read_text()  # noqa: PT018
        time.sleep(0.05)
    (worker,) = workers_of(run.pid)
    os.kill(worker, signal.SIGSTOP)
    reached = -1
    while reached != (reached := logged()):  # the batches that were ready are used up
        assert run.poll() is None and time.monotonic() < until, log.read_text()  # noqa: PT018
        time.sleep(1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143, log.read_text()
    assert f"saved step {reached} in {out}" in log.read_text()
    assert not Path(f"/proc/{worker}").exists()
