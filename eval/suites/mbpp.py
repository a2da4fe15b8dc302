"""MBPP (google-research-datasets/mbpp) and MBPP+ (evalplus/mbppplus)."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from eval.suites import plus
from eval.suites.types import Script, Table, Task
from laneformer_jax.errors import UserError

TEST_IDS = range(11, 511)  # MBPP's test split

_SILENT = (
    "the released comparison never asserts; judged by whether something was found, as EvalPlus"
)
_CORRECTIONS = {
    737: (("presence",), _SILENT),
    787: (("presence",), _SILENT),
    794: (("presence",), _SILENT),
    558: (("digits",), "unequal lengths are open; padding by zeros is right too, as EvalPlus"),
    581: (("surface",), "which height is open; the pyramid's is right too, as EvalPlus"),
}

_SECONDS = {599: 30, 255: 20, 271: 8, 392: 8, 123: 6, 592: 4, 603: 4, 300: 3, 84: 2, 389: 2, 589: 2}


def plus_tasks(rows: Iterable[Mapping[str, Any]]) -> dict[str, Task]:
    """MBPP+ rows (task_id, code, prompt, test_imports, test_list, test) as tasks."""
    tasks = [_plus_task(row) for row in rows]
    return {task.task_id: task for task in tasks}


def _plus_task(row: Mapping[str, Any]) -> Task:
    number = int(row["task_id"])
    task_id = f"Mbpp/{number}"
    rule, correction = _CORRECTIONS.get(number, (None, ""))
    # The inputs begin with those of `test_list`, MBPP's own tests.
    base = len(row["test_list"])

    def tests() -> Table:
        return plus.parse(task_id, row["test"], rule, base)

    return Task(
        task_id,
        prompt(row["prompt"], row["test_list"][0]),
        plus.entry_point(row["test"]),
        row["code"],
        tests,
        ("base", "plus"),
        correction,
        _SECONDS.get(number, 0),
    )


def prompt(text: str, example: str) -> str:
    """EvalPlus's prompt: the text, without links, and one assertion, as a docstring."""
    text = re.sub(r"https?://\S+", "", text.strip())
    return f'"""\n{text}\n{example.strip()}\n"""\n'


def base_tasks(rows: Iterable[Mapping[str, Any]]) -> dict[str, Task]:
    """MBPP rows (task_id, text, code, test_list, test_setup_code) as tasks."""
    tasks = [_base_task(row) for row in rows]
    return {task.task_id: task for task in tasks}


def _base_task(row: Mapping[str, Any]) -> Task:
    task_id = f"Mbpp/{row['task_id']}"
    asserts = [_assertion(task_id, source) for source in row["test_list"]]
    # The outermost call on the left of something that the program defines, as in `set(f(x)) == …`;
    # a program may call its function `sum`.
    calls = [n.func for n in ast.walk(asserts[0].left) if isinstance(n, ast.Call)]
    names = [f.id for f in calls if isinstance(f, ast.Name)]
    defined = {n.name for n in ast.parse(row["code"]).body if isinstance(n, ast.FunctionDef)}
    entry = next(name for name in names if name in defined)
    return Task(
        task_id,
        prompt(row["text"], row["test_list"][0]),
        entry,
        row["code"],
        functools.partial(_script, entry, asserts, row["test_setup_code"]),
        ("base",),
    )


def _assertion(task_id: str, source: str) -> ast.Compare:
    match ast.parse(source).body:
        case [ast.Assert(test=ast.Compare(ops=[ast.Eq()], comparators=[_]) as test)]:
            return test
    raise UserError(f"{task_id}: a test that is not `assert … == …`: {source[:80]}")


def _script(entry: str, asserts: list[ast.Compare], setup: str) -> Script:
    # The left side calls the program, may build its classes, and holds no expected value: it is
    # evaluated in the candidate's process. The right side stays in the trusted one.
    lines = [
        f"_out = evaluate_in_candidate({ast.unparse(test.left)!r})\n"
        f"assert _out == ({ast.unparse(test.comparators[0])})\n"
        for test in asserts
    ]
    return Script(entry, "import math\nimport sys\n", "".join(lines), setup.replace("\r\n", "\n"))
