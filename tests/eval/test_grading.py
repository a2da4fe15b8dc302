import dataclasses
import marshal
import time

import pytest

from eval.grading import Grader
from eval.suites import Reference, Script, Table, Task, load_suite


def task(tests, canonical="def f(x): return x", parts=("base", "plus")):
    return Task("Test/0", "", "f", canonical, lambda: tests, parts)


def table(inputs, expected, rule=("equal", 0), base=1, reference=None):
    encoded = None if expected is None else [marshal.dumps(x, 2) for x in expected]
    return Table("f", inputs, encoded, rule, base, reference)


@pytest.fixture(scope="module")
def grade(sandbox):
    with Grader(sandbox, min_seconds=5.0) as grader:
        yield lambda tests, program: grader.grade(task(tests), program)


SQUARES = table([[1], [2], [3]], [1, 4, 9])


@pytest.mark.smoke
def test_right_program(grade):
    got = grade(SQUARES, "def f(x): return x * x")
    assert (got.kind, got.passed) == ("pass", {"base": True, "plus": True})


@pytest.mark.parametrize(
    ("program", "kind", "base", "told"),
    [
        ("def f(x): return 1", "wrong answer", True, "wrong result"),
        ("def f(x): return 0", "wrong answer", False, "wrong result"),
        ("def f(x): return x * x if x < 3 else 1 // 0", "exception", True, "ZeroDivisionError"),
        ("def f(x: return 1", "exception", False, "SyntaxError"),
        ("def g(x): return x * x", "exception", False, "the program defines no 'f'"),
        ("", "exception", False, "the program defines no 'f'"),
        ("import nothing_like_this\ndef f(x): return x * x", "exception", False, "ModuleNotFound"),
        ("import sys\ndef f(x): sys.exit(0)", "exception", False, "SystemExit"),
        ("def f(x): return input()", "exception", False, "EOFError"),
        ("import os\ndef f(x): os.kill(os.getpid(), 9)", "exception", False, "PermissionError"),
        ("def f(x): return open('/proc/self/environ').read()", "exception", False, "PermissionErr"),
        ("import os\ndef f(x): os._exit(0)", "crash", False, "exited with status 0"),
        ("import ctypes\ndef f(x): ctypes.string_at(0)", "crash", False, "SIGSEGV"),
        ("def f(x):\n  while x == 3: pass\n  return x * x", "time limit", True, "running after 5 s"),
        ("while True: pass", "time limit", False, "still running after 5 s"),
        ("def f(x): return f(x)", "exception", False, "RecursionError"),
        ("def f(x): return [0] * 10**12", "exception", False, "MemoryError"),
    ],
)  # fmt: skip
def test_wrong_programs(grade, program, kind, base, told):
    got = grade(SQUARES, program)
    assert (got.kind, got.passed) == (kind, {"base": base, "plus": False})
    assert told in got.reason


def test_names_the_first_failing_call(grade):
    got = grade(SQUARES, "def f(x): return [x] if x == 2 else x * x")
    assert (got.failed_call, got.expected, got.got) == ("f(2)", "4", "[2]")
    assert got.passed == {"base": True, "plus": False}


def test_output_is_not_kept(sandbox):
    noisy = "def f(x):\n  for _ in range(1000 * (x == 1)): print('x' * 10**6)\n  return x * x"
    with Grader(sandbox) as grader:
        assert grader.grade(task(SQUARES), noisy).kind == "pass"


@pytest.mark.parametrize(
    ("expected", "out", "right"),
    [
        (1, "True", True),
        (1, "1.0", True),
        ([1, 2], "(1, 2)", False),
        (1.0, "1.0000005", True),
        (1.0, "1.000005", False),
        ([1.0, 2.0], "[1.0000001, 2.0]", True),
        ([1.0, 2.0], "(1.0000001, 2.0)", False),  # EvalPlus asks for the same type
        ([1.0, 2.0], "[1.0000001]", False),
        ([], "()", False),
        ([1.0], "1.0000001", False),  # no broadcasting
        (float("inf"), "float('inf')", True),
        (1.0, "float('nan')", False),
        ({1, 2}, "frozenset({2, 1})", True),
        ({"a": 1}, "__import__('collections').Counter(a=1)", True),
        ({"a": [1]}, "__import__('collections').defaultdict(list, a=[1])", True),
        ({1, 2}, "{1: 0, 2: 0}.keys()", True),
        (0.5, "__import__('fractions').Fraction(1, 2)", True),
        (0.5, "__import__('decimal').Decimal('0.5')", True),
        (2, "__import__('enum').IntEnum('E', 'A B').B", True),
        ((1, 2), "__import__('collections').namedtuple('P', 'a b')(1, 2)", True),
        (2.5, "__import__('numpy').float64(2.5)", True),
        (3, "__import__('numpy').int32(3)", True),
        ([3], "[__import__('numpy').int64(3)]", True),
        ([3, 4], "__import__('numpy').array([3, 4])", False),
        ("é\ud800", "'é\\ud800'", True),
        (-(2**100), "-2**100", True),
        (0.0, "-0.0", True),
        (1 + 2j, "1+2j", True),
        (b"x", "bytearray(b'x')", True),
        ([0, 1], "range(2)", False),
        ([0, 1], "(i for i in (0, 1))", False),
        (None, "None", True),
        (True, "object()", False),
    ],
)  # fmt: skip
def test_comparison(grade, expected, out, right):
    got = grade(table([[0]], [expected]), f"def f(x): return {out}")
    assert (got.kind == "pass") == right, got


@pytest.mark.parametrize(
    ("rule", "arguments", "expected", "out", "right"),
    [
        (("set", 0), [0], [1, 2, 2], "(2, 1)", True),
        (("set", 0), [0], [1, 2], "[1]", False),
        (("presence",), [0], True, "__import__('re').match('a', 'a')", True),
        (("presence",), [0], True, "None", False),
        (("presence",), [0], False, "False", True),
        (("presence",), [0], True, "'text'", True),
        (("root", 1e-4), [[-6, 11, -6, 1]], None, "2.0", True),
        (("root", 1e-4), [[-6, 11, -6, 1]], None, "2.5", False),
        (("equal", 1e-4), [0], [1.0, [2.0]], "[1.00001, [2.00001]]", True),
        (("digits",), [23, 5], 99, "4", True),
        (("surface",), [3, 4], 0, "35", True),
    ],
)
def test_other_rules(grade, rule, arguments, expected, out, right):
    got = grade(table([arguments], [expected], rule), f"def f(*x): return {out}")
    assert (got.kind == "pass") == right, got


def test_reference_runs_apart(grade):
    tests = table([[3], [4]], None, reference=Reference("def r(n): return list(range(n))", "r"))
    assert grade(tests, "def f(n): return [i for i in range(n)]").kind == "pass"
    assert grade(tests, "def f(n): return [float(i) for i in range(n)]").kind == "pass"
    assert grade(tests, "def f(n): return list(range(3))").passed == {"base": True, "plus": False}
    cheat = "import sys\ndef f(n): return sys.modules['candidate'].r(n)"
    assert grade(tests, cheat).kind == "exception"


def test_long_results_are_encoded_in_pieces(grade):
    tests = table([[300_000]], None, reference=Reference("def r(n): return list(range(n))", "r"))
    assert grade(tests, "def f(n): return list(range(n))").kind == "pass"
    assert grade(tests, "def f(n): return list(range(n))[:-1] + [0]").kind == "wrong answer"


def test_very_long_results_are_compared_by_digest(grade):
    """70 MB that never leave the process; the reference's digest never enters it."""
    reference = Reference("def r(n): return ['x' * 1000] * 70_000 + [n]", "r")
    tests = table([[3], [4]], None, reference=reference)
    assert grade(tests, "def f(n): return ['x' * 1000] * 70_000 + [n]").kind == "pass"
    got = grade(tests, "def f(n): return ['x' * 1000] * 70_000 + [3]")
    assert (got.kind, got.passed) == ("wrong answer", {"base": True, "plus": False})
    assert got.got == "a value of 70350010 bytes"
    # Where the expected value is known it is short, and so a digest is never right.
    got = grade(SQUARES, "def f(x): return ['x' * 1000] * 70_000")
    assert (got.kind, got.got) == ("wrong answer", "a value of 70350005 bytes")


@pytest.mark.parametrize("payload", ["bytes(40)", "(8).to_bytes(8, 'little') + bytes(32)", "b''"])
def test_a_digest_made_up_is_no_pass(grade, payload):
    """A program that finds the pipe and the secret still does not know the right result."""
    forged = (
        "import gc\n"
        "def f(x):\n"
        "  for o in gc.get_objects():\n"
        "    if type(o).__name__ == 'Channel':\n"
        f"      for _ in range(9): o.send(b'D', {payload})\n"
        "  import time; time.sleep(9)"
    )
    reference = Reference("def r(x): return x", "r")
    for tests in (SQUARES, table([[1], [2]], None, reference=reference)):
        assert grade(tests, forged).kind in ("wrong answer", "crash")


SCRIPT = Script(
    "f", "def helper(x): return x", "for i in range(3):\n  assert candidate(helper(i)) == i\n"
)


def test_script_calls_the_candidate_from_outside(grade):
    assert grade(SCRIPT, "def f(x): return x").kind == "pass"
    got = grade(SCRIPT, "def f(x): return min(x, 1)")
    assert (got.kind, got.reason) == ("wrong answer", "f(2) returned 1")
    assert grade(SCRIPT, "def helper(x): return 0\ndef f(x): return 0").kind == "wrong answer"
    assert "ValueError: no" in grade(SCRIPT, "def f(x): raise ValueError('no')").reason
    assert grade(SCRIPT, "def f(x):\n  while True: pass").kind == "time limit"
    assert grade(SCRIPT, "def f(x): return x").kind == "pass"


def test_time_limit_grows_with_the_canonical_solution(sandbox):
    """Slower than the limit, but less than ten times the canonical: right."""
    slow = "import time\ndef f(x):\n  time.sleep({})\n  return x"
    with Grader(sandbox, min_seconds=1.0) as grader:
        patient = task(table([[1]], [1]), slow.format(1.0))
        assert grader.grade(patient, slow.format(2.5)).kind == "pass"
        strict = Task("Test/1", "", "f", "def f(x): return x", lambda: patient.tests, ("plus",))
        assert grader.grade(strict, slow.format(600)).kind == "time limit"


def test_judge_survives_hostile_results(grade):
    """A result that kills the judge is wrong, and the next one is judged all the same."""
    tests = table([[0]], [[1.0]])
    for out in (
        "[1 << (1 << 26)]",
        "[1.0, [1 << 10**6]]",
        "{i * (2**61 - 1) for i in range(10_000)}",
        "[[]] * 10**6",
    ):
        assert grade(tests, f"def f(x): return {out}").kind in ("wrong answer", "time limit")
        assert grade(tests, "def f(x): return [1.0000001]").kind == "pass"


def test_dataclasses_and_futures_work(grade):
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n  x: int\ndef f(x: P) -> int: return P(x).x ** 2"
    )
    assert grade(SQUARES, program).kind == "pass"


def test_threads_and_asyncio_work(grade):
    program = (
        "import asyncio\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "async def g(x): return x * x\n"
        "def f(x):\n  with ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [1])) == [1]\n"
        "  return asyncio.run(g(x))"
    )
    assert grade(SQUARES, program).kind == "pass"


def test_broken_release_of_humaneval_32(evaldata, sandbox):
    suite = load_suite("humaneval+", evaldata)
    with Grader(sandbox) as grader:
        right = suite.tasks["HumanEval/32"]
        assert grader.grade(right, right.canonical).kind == "pass"
        wrong = right.prompt + "    return 0.0\n"
        assert grader.grade(right, wrong).kind == "wrong answer"


def test_a_comparison_that_never_asserts_is_mended(evaldata, sandbox):
    suite = load_suite("mbpp+", evaldata)
    with Grader(sandbox) as grader:
        for task_id in ("Mbpp/737", "Mbpp/787", "Mbpp/794"):
            broken = suite.tasks[task_id]
            assert grader.grade(broken, broken.canonical).kind == "pass"
            nothing = f"def {broken.entry_point}(x): return None"
            assert grader.grade(broken, nothing).kind == "wrong answer"


def test_long_tasks_come_first(sandbox):
    long = dataclasses.replace(task(SQUARES), seconds=5.0)
    programs = [("a", task(SQUARES), ""), ("b", long, ""), ("c", task(SQUARES), "")]
    with Grader(sandbox) as grader:
        assert [key for key, _ in grader.grade_many(programs, workers=1)] == ["b", "a", "c"]


def test_interrupted_judging_ends_at_once(sandbox):
    endless = "def f(x):\n  while True: pass"
    programs = [("a", task(SQUARES), "def f(x): return 0"), ("b", task(SQUARES), endless)]

    def interrupted(grader):
        for key, _ in grader.grade_many(programs, workers=2):
            assert key == "a"
            raise KeyboardInterrupt

    began = time.monotonic()
    with Grader(sandbox) as grader, pytest.raises(KeyboardInterrupt):
        interrupted(grader)
    assert time.monotonic() - began < 30
