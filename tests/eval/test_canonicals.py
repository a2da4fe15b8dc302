"""Released solutions pass, all of them, and the benchmark's own speed is kept."""

import contextlib
import gzip
import json
import multiprocessing
import os
import time

import pytest

from eval.grading import Grader
from eval.sandbox.probe import open_sandbox
from eval.suites import load_suite, mbpp
from laneformer_jax.errors import UserError

pytestmark = pytest.mark.slow


def judge(suite_tasks, sandbox):
    with Grader(sandbox) as grader:
        programs = ((i, task, task.canonical) for i, task in suite_tasks.items())
        return {i: v for i, v in grader.grade_many(programs, workers=2) if v.kind != "pass"}


@pytest.fixture(params=[True, False], ids=["bubblewrap", "landlock+seccomp"])
def any_sandbox(request):
    found = open_sandbox(bubblewrap=request.param)
    if request.param and not found.bubblewrap:
        pytest.skip("bubblewrap is not installed")
    return found


@pytest.mark.parametrize("name", ["humaneval", "humaneval+", "mbpp+"])
def test_canonical_solutions_pass(evaldata, any_sandbox, name):
    assert judge(load_suite(name, evaldata).tasks, any_sandbox) == {}


def test_all_of_mbpp_passes(evaldata, sandbox):
    with gzip.open(evaldata / "mbpp.jsonl.gz", "rt") as lines:
        tasks = mbpp.base_tasks(map(json.loads, lines))
    assert len(tasks) == 974
    assert judge(tasks, sandbox) == {}


def test_test_lists_of_mbpp_plus_pass(evaldata, sandbox):
    """MBPP's own asserts, as far as they have MBPP's form, on MBPP+'s corrected solutions."""
    with gzip.open(evaldata / "MbppPlus-OriginFmt.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    tasks = {}
    for row in rows:
        with contextlib.suppress(UserError):  # `assert f(x)`, `assert math.isclose(…)`
            tasks |= mbpp.base_tasks([{**row, "text": row["prompt"], "test_setup_code": ""}])
    assert len(tasks) > 330
    assert judge(tasks, sandbox) == {}


def spin(stop):
    while not stop.is_set():
        sum(range(10_000))


@pytest.mark.parametrize("name", ["humaneval+", "mbpp+"])
def test_busy_machine_fails_nothing(evaldata, sandbox, name):
    """Two more busy processes per core than there are cores."""
    stop = multiprocessing.get_context("spawn").Event()
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=spin, args=(stop,)) for _ in range(4)]
    for process in busy:
        process.start()
    try:
        assert judge(load_suite(name, evaldata).tasks, sandbox) == {}
    finally:
        stop.set()
        for process in busy:
            process.join()


def busy_seconds():
    """CPU seconds that all processes of this machine have used so far, on all cores."""
    names = "user nice system idle iowait irq softirq steal".split()
    with open("/proc/stat") as file:
        ticks = dict(zip(names, map(int, file.readline().split()[1:]), strict=False))
    return (sum(ticks.values()) - ticks["idle"] - ticks["iowait"]) / os.sysconf("SC_CLK_TCK")


def load_now(seconds=3.0):
    """Cores in use by anything, on average over so many seconds from now."""
    before = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / seconds


@pytest.mark.parametrize(("name", "seconds"), [("humaneval+", 40), ("mbpp+", 75)])
def test_wall_time(evaldata, sandbox, name, seconds):
    """On two idle cores; a machine that does other things before or after cannot say."""
    if load_now() > 0.2:
        pytest.skip("the machine is busy with something else")
    began = time.monotonic()
    assert judge(load_suite(name, evaldata).tasks, sandbox) == {}
    took = time.monotonic() - began
    print(f"{name}: {took:.1f} s")
    if took >= seconds and load_now() > 0.2:
        pytest.skip(f"{took:.0f} s, but the machine has become busy with something else")
    assert took < seconds
