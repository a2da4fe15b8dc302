import os
import pty
import re
import subprocess
import sys

import pytest

from laneformer_jax import progress as module
from laneformer_jax.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_plain_lines_are_first_last_and_spaced_in_time(capsys, clock):
    with progress(5, "train", "steps") as bar:
        for seconds, loss in ((2, 3.14159), (9, 3.0), (1, 2.5), (5, 2.2), (3, 2.0)):
            clock(seconds)
            bar.advance(loss=loss)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "train: 1/5 steps, 0:02 elapsed, ETA 0:08, loss=3.142",
        "train: 3/5 steps, 0:12 elapsed, ETA 0:08, loss=2.5",
        "train: 5/5 steps, 0:20 elapsed, loss=2",
    ]


def test_resumed_count_does_not_enter_the_rate(capsys, clock):
    with progress(110, "train", "steps", start=100) as bar:
        clock(10)
        bar.advance(1)
    assert capsys.readouterr().err == "train: 101/110 steps, 0:10 elapsed, ETA 1:30\n"


def test_unknown_total_has_no_eta(capsys):
    with progress(None, "read", "files") as bar:
        bar.advance(3)
    assert capsys.readouterr().err == "read: 3 files, 0:00 elapsed\n"


def test_a_terminal_gets_a_bar_with_eta():
    code = (
        "from laneformer_jax.progress import progress\n"
        "with progress(3, 'train', 'steps') as bar:\n"
        "    for loss in (3.0, 2.0, 1.5):\n"
        "        bar.advance(loss=loss)\n"
    )
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other end was closed
        pass
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "train" in text
    assert "3/3 steps" in text
    assert "ETA" in text
    assert "loss=1.5" in text
