"""A run that is killed at any moment ends with the same losses, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from laneformer_jax.checkpoint import native
from train.clock import TIMED
from train.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


class Run:
    """One process that trains into `out`; its output goes to a file, which no kill can close."""

    def __init__(self, corpus: Path, out: Path, steps: int, env: dict[str, str] | None = None):
        self.metrics = out / "metrics.jsonl"
        self._log = out.with_name(f"{out.name}-{time.time_ns()}.log")
        self._earlier = self._inode()
        command = [sys.executable, "-m", "laneformer_jax", "train", "--out", str(out)]
        command += ["--config", str(corpus / "run.yaml"), f"train.steps={steps}"]
        fast = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **fast, **(env or {})},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def output(self) -> str:
        return self._log.read_text()

    def end(self, code: int = 0) -> str:
        assert self.process.wait(TIMEOUT_S) == code, self.output()
        return self.output()

    def kill(self) -> None:
        """Asserts that it was running until now."""
        self.process.send_signal(signal.SIGKILL)
        self.end(-signal.SIGKILL)

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.002)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: self.logged(step))

    def wait_for_seconds(self, seconds: float, unless_step: int) -> None:
        """Not beyond a step, so that a fast machine is not through before."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > until or self.logged(unless_step))

    def logged(self, step: int) -> bool:
        """Whether this process, not the one before it, has logged the step."""
        if self._inode() == self._earlier:
            return False
        return any(r["step"] >= step for r in read_jsonl(self.metrics))

    def _inode(self) -> int | None:
        return self.metrics.stat().st_ino if self.metrics.exists() else None


def results(out: Path) -> list[dict]:
    """The metrics without those that depend on the clock."""
    return [
        {k: v for k, v in r.items() if k not in TIMED} for r in read_jsonl(out / "metrics.jsonl")
    ]


def saved(out: Path) -> list[int]:
    return sorted(int(p.name) for p in native.candidates(out))


def test_kills_damage_and_a_signal_change_nothing(corpus, tmp_path):
    steps, rng = 40, random.Random()
    whole, out = tmp_path / "whole", tmp_path / "killed"
    # The flag that the docs name for GPUs; a CPU gives the same bits without it.
    Run(corpus, whole, steps, {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}).end()

    run = Run(corpus, out, steps)
    run.wait_for_step(rng.randint(6, 9))
    time.sleep(rng.random() * 0.05)
    run.kill()
    # What kills at worse moments leave: a line and a save cut short, below a removal.
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "tok')
    (out / "checkpoints" / "33.orbax-checkpoint-tmp" / "layer_000").mkdir(parents=True)

    run = Run(corpus, out, steps)
    run.wait_for_step(rng.randint(17, 19))
    run.kill()
    (out / "checkpoints" / "1" / "optimizer").mkdir(parents=True)
    newest = out / "checkpoints" / str(saved(out)[-1])
    file = max((newest / "layer_001").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    run = Run(corpus, out, steps)
    run.wait_for_step(24)
    run.process.send_signal(signal.SIGTERM)
    output = run.end(143)
    assert f"{newest} is not complete" in output
    assert "falling back to the newest complete one" in output
    last = results(out)[-1]["step"]
    assert f"saved step {last} in {out}" in output
    assert saved(out)[-1] == last < steps

    output = Run(corpus, out, steps).end()
    assert "warning" not in output
    assert [r["step"] for r in results(whole) if "loss" in r] == list(range(1, steps + 1))
    assert [r["step"] for r in results(whole) if "eval_loss" in r] == [7, 14, 21, 28, 35, 40]
    assert results(out) == results(whole)
    last = read_jsonl(out / "metrics.jsonl")[-2]
    assert 0 < last["useful_s"] < last["wall_s"]  # of all four processes
    assert last["goodput"] < read_jsonl(whole / "metrics.jsonl")[-2]["goodput"]
    assert saved(out) == saved(whole) == [35, 40]
    assert not list((out / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
def test_ten_kills_and_a_second_resume_change_nothing(corpus, tmp_path):
    steps, rng = 120, random.Random()
    whole, out = tmp_path / "whole", tmp_path / "killed"
    Run(corpus, whole, steps).end()
    for i in range(10):
        run = Run(corpus, out, steps)
        if i in (3, 7):  # while it starts, compiles or restores
            run.wait_for_seconds(rng.random() * 15, unless_step=11 * i)
        else:
            run.wait_for_step(rng.randint(1, 11) + 11 * i)
            time.sleep(rng.random() * 0.2)
        run.kill()
    Run(corpus, out, steps).end()
    assert results(out) == results(whole)
    # Complete: one more changes nothing.
    Run(corpus, out, steps).end()
    assert results(out) == results(whole)
    assert saved(out) == saved(whole) == [115, 120]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_other_devices_and_another_affinity_are_warned_of(corpus, tmp_path):
    out, steps = tmp_path / "moved", 2000
    run = Run(corpus, out, steps)
    run.wait(lambda: saved(out) != [])
    run.process.send_signal(signal.SIGTERM)
    # Signals sent together may arrive in any order.
    run.wait(lambda: "SIGTERM: saving" in run.output())
    # The second ends it at once.
    run.process.send_signal(signal.SIGINT)
    assert "exiting without saving" in run.end(130)
    run = Run(corpus, out, steps, {"JAX_NUM_CPU_DEVICES": "2"})
    os.sched_setaffinity(run.process.pid, {min(os.sched_getaffinity(0))})
    run.wait_for_step(8)
    run.kill()
    warned = [line for line in run.output().splitlines() if "not bit for bit" in line]
    assert len(warned) == 1
    assert "device_count: 1 then, 2 now" in warned[0]
    if len(os.sched_getaffinity(0)) > 1:
        assert "cpu_affinity: " in warned[0]
    losses = [r["loss"] for r in results(out) if "loss" in r]
    assert len(losses) >= 8
    assert np.isfinite(losses).all()


SIGNALLED = """
import time
from train.signals import stop_on_signals
with stop_on_signals() as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.01)
    print("saving", flush=True)
    {save}
raise SystemExit(stop.exit_code)
"""


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGTERM, None, 143),
        (signal.SIGUSR1, None, 138),
        (signal.SIGTERM, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
    ],
)
def test_the_first_signal_asks_and_the_second_ends_at_once(first, second, code):
    """The second one comes during a save that would never end."""
    script = SIGNALLED.format(save="pass" if second is None else "time.sleep(1000)")
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == "saving\n"
    if second is not None:
        process.send_signal(second)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"{first.name}: saving, then exiting" in errors
    assert ("exiting without saving" in errors) == (second is not None)
