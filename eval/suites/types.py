"""What a benchmark task is: a prompt, an entry point and the tests that judge a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Rule = tuple[Any, ...]  # see `eval.sandbox.inside.compare`


@dataclass(frozen=True)
class Reference:
    """A function of the data set that computes expected results; run in a sandbox of its own."""

    source: str
    function: str


@dataclass(frozen=True)
class Table:
    """Calls with known arguments and results.

    Args:
        function: name of the function under test.
        inputs: one list of arguments per call.
        expected: one marshalled (format 2) result per call; None where `reference` computes them.
        rule: the comparison.
        base: how many leading calls are the original benchmark's; None when unknown.
    """

    function: str
    inputs: list[list[Any]]
    expected: list[bytes] | None
    rule: Rule
    base: int | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class Script:
    """A test program of the data set that calls the function under test by itself.

    Args:
        function: name of the function under test, `candidate` in the test.
        helpers: source run before the test in the trusted process.
        test: source; calls `candidate(...)` or `evaluate_in_candidate(source)`.
        program: source put after the candidate's program, in its process.
    """

    function: str
    helpers: str
    test: str
    program: str = ""


@dataclass(frozen=True)
class Task:
    """One problem.

    Args:
        task_id: such as `HumanEval/0` or `Mbpp/2`, as in EvalPlus's files.
        prompt: what a model is asked to complete, as EvalPlus gives it.
        entry_point: function to define.
        canonical: a program that passes.
        parse_tests: makes `tests`; called on first use because some tests are large.
        parts: names of the scores: `base`, `plus` or both.
        correction: how the released test was wrong and what is done instead, or "".
        seconds: about what the released solution takes, where that is long.
    """

    task_id: str
    prompt: str
    entry_point: str
    canonical: str
    parse_tests: Callable[[], Table | Script] = field(repr=False)
    parts: tuple[str, ...]
    correction: str = ""
    seconds: float = 0.0

    @cached_property
    def tests(self) -> Table | Script:
        """The tests, parsed."""
        return self.parse_tests()


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Args:
        name: such as `humaneval+`.
        family: `humaneval` or `mbpp`; suites of a family share answers.
        source: where its rows came from.
        tasks: by task id, in the data set's order.
    """

    name: str
    family: str
    source: str
    tasks: Mapping[str, Task]

    @property
    def corrections(self) -> dict[str, str]:
        """Task id to what was corrected on load."""
        return {t.task_id: t.correction for t in self.tasks.values() if t.correction}

    def subset(self, task_ids: list[str]) -> Suite:
        """The same suite with these tasks only."""
        return Suite(self.name, self.family, self.source, {i: self.tasks[i] for i in task_ids})
