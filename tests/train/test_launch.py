"""The launch files, with stand-ins for what a cluster has."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "train" / "launch"
# A training process as its launcher sees it: told USR1 it saves for a while, then exits with 138.
SRUN = """#!/bin/bash
echo "srun $*" >>"$CALLS"
trap 'sleep 0.3; echo saved >>"$CALLS"; exit 138' USR1
echo $$ >"$CALLS.pid"
[ -n "${ENDS:-}" ] && exit "$ENDS"
while true; do sleep 0.05; done
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$CALLS"
kill -USR1 "$(cat "$CALLS.pid")"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$CALLS"
"""


def start(folder: Path, *arguments: str, **env: str) -> subprocess.Popen:
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": "7",
    }
    return subprocess.Popen(["bash", str(LAUNCH / "slurm.sbatch"), *arguments], env=env)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def test_slurm_before_the_limit_saves_and_requeues(tmp_path):
    job = start(tmp_path, "350m/pretrain", "runs/a b", "train.steps=9")
    until = time.monotonic() + 60
    while not (tmp_path / "calls.pid").exists() or not (tmp_path / "calls.pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)  # to the batch shell alone, as --signal=B:USR1@300 does
    assert job.wait(60) == 138
    command = "laneformer train --config 350m/pretrain --out runs/a b --distributed slurm"
    assert calls(tmp_path) == [
        f"srun --kill-on-bad-exit=0 {command} train.steps=9",
        "scancel --signal=USR1 7",
        "saved",
        "scontrol requeue 7",
    ]


@pytest.mark.parametrize("code", [0, 2, 143])
def test_slurm_requeues_nothing_that_is_over(tmp_path, code):
    assert start(tmp_path, "350m/pretrain", "runs/a", ENDS=str(code)).wait(60) == code
    assert len(calls(tmp_path)) == 1


def test_slurm_without_a_run_is_told_how(tmp_path):
    assert start(tmp_path, "350m/pretrain").wait(60) == 2
    assert not (tmp_path / "calls").exists()
