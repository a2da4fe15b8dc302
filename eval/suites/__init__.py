"""Benchmark suites: HumanEval, HumanEval+, MBPP and MBPP+."""

from eval.suites.source import SUITES, load_suite
from eval.suites.types import Reference, Script, Suite, Table, Task

__all__ = ["SUITES", "Reference", "Script", "Suite", "Table", "Task", "load_suite"]
