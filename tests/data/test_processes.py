"""Workers: in order, and never waited for in vain."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
from worker_functions import act

from data.processes import Processes
from laneformer_jax.errors import UserError


@pytest.fixture(scope="module")
def two():
    with closing(Processes(act, 2)) as processes:
        yield processes


def call(processes, what, value=None):
    return next(processes.map([(what, value)], ahead=0))


def test_results_come_in_order_from_every_worker(two):
    assert list(two.map([("echo", i) for i in range(20)], ahead=5)) == list(range(20))
    assert len(set(two.map([("pid", 0)] * 8, ahead=8))) == 2


def test_no_more_is_asked_than_ahead(two):
    asked = []
    results = two.map((asked.append(i) or ("echo", i) for i in range(20)), ahead=4)
    next(results)
    assert asked == [0, 1, 2, 3, 4]
    list(results)


def test_errors_of_the_function_arrive_and_leave_the_worker_alive(two):
    with pytest.raises(UserError, match="row 3 is bad"):
        call(two, "refuse", "row 3 is bad")
    with pytest.raises(RuntimeError, match=r"(?s)in a data worker:.*Local: deep down"):
        call(two, "fail")
    assert call(two, "echo", 7) == 7


@pytest.mark.parametrize(
    ("what", "value", "found"),
    [
        ("die", signal.SIGKILL, "exit code -9: it was killed"),
        ("die_while_answering", None, "exit code -9: it was killed"),
        ("leave", 0, "exit code 0"),
        ("answer_badly", None, "exit code 1: its error is above"),
    ],
)
def test_a_worker_that_ends_is_an_error_for_all_it_was_asked(what, value, found):
    with closing(Processes(act, 1)) as processes:
        answers = processes.map([("echo", 1), (what, value), ("echo", 2), ("echo", 3)], ahead=4)
        assert next(answers) == 1
        began = time.monotonic()
        with pytest.raises(UserError, match=found):
            next(answers)
        with pytest.raises(UserError, match=found):
            call(processes, "echo", 4)
        assert time.monotonic() - began < 5


def test_closing_does_not_wait_for_a_busy_worker():
    processes = Processes(act, 1)
    assert call(processes, "echo", 0) == 0
    results = processes.map([("pid", 0), ("sleep", 60)], ahead=1)
    pid = next(results)
    began = time.monotonic()
    processes.close()
    assert time.monotonic() - began < 5
    assert pid not in [p.pid for p in multiprocessing.active_children()]


def test_workers_end_with_a_main_process_that_is_killed(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal
            from data.processes import Processes
            from worker_functions import act
            if __name__ == "__main__":
                pids = Processes(act, 2).map([("pid", 0)] * 4, ahead=4)
                print(*set(pids), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    root, here = Path(__file__).parents[2], Path(__file__).parent
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{here}"},
        check=False,
    )
    # The output ends only when the workers have let go of it, too.
    assert run.returncode == -signal.SIGKILL
    assert len(run.stdout.split()) == 2


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from data.processes import Processes\n"
        "from worker_functions import act\n"
        "print(list(Processes(act, 1).map([('echo', 1)], ahead=1)))\n"
    )
    root, here = Path(__file__).parents[2], Path(__file__).parent
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{here}"},
        check=False,
    )
    assert run.returncode == 1
    assert "a script that starts workers needs `if __name__ == '__main__':`" in run.stderr
