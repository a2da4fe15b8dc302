import ast
import gzip
import json
import marshal
import math
import random

import pytest

from eval.suites import load_suite, plus
from eval.suites.humaneval import BASE_COUNTS
from eval.suites.literal import literal
from laneformer_jax.errors import UserError


@pytest.fixture(scope="module")
def native(evaldata):
    rows = {}
    for name in ("HumanEvalPlus", "MbppPlus"):
        with gzip.open(evaldata / f"{name}.jsonl.gz", "rt") as lines:
            rows |= {row["task_id"]: row for row in map(json.loads, lines)}
    return rows


@pytest.mark.parametrize(
    ("name", "count", "corrected"),
    [
        ("humaneval", 164, []),
        ("humaneval+", 164, ["HumanEval/32"]),
        ("mbpp", 500, []),
        ("mbpp+", 378, ["Mbpp/558", "Mbpp/581", "Mbpp/737", "Mbpp/787", "Mbpp/794"]),
    ],
)
def test_loads(evaldata, name, count, corrected):
    suite = load_suite(name, evaldata)
    assert len(suite.tasks) == count
    assert sorted(suite.corrections) == corrected


@pytest.mark.parametrize("name", ["humaneval+", "mbpp+"])
def test_agrees_with_the_native_files(evaldata, native, name):
    """Prompt, entry point and tolerance, task by task, and the base inputs of a few."""
    suite = load_suite(name, evaldata)
    for task_id, task in suite.tasks.items():
        assert task.prompt == native[task_id]["prompt"]
        assert task.entry_point == native[task_id]["entry_point"]
    for task_id in random.Random(0).sample(sorted(suite.tasks), 25):
        table = suite.tasks[task_id].tests
        assert table.function == native[task_id]["entry_point"]
        if table.rule[0] in ("equal", "set", "root"):
            assert table.rule[1] == native[task_id]["atol"]
        assert len(table.inputs) == len(table.expected or table.inputs)


def test_base_counts_are_those_of_the_native_file(evaldata, native):
    """HumanEval+: the leading inputs are exactly the original benchmark's."""
    suite = load_suite("humaneval+", evaldata)
    assert len(BASE_COUNTS) == 164
    for number in random.Random(1).sample(range(164), 30):
        task_id = f"HumanEval/{number}"
        leading = suite.tasks[task_id].tests.inputs[: BASE_COUNTS[number]]
        base = native[task_id]["base_input"]
        assert {repr(x) for x in leading} == {repr(x) for x in base}


def test_reads_the_nine_references(evaldata):
    found = {
        task_id
        for name in ("humaneval+", "mbpp+")
        for task_id, task in load_suite(name, evaldata).tasks.items()
        if task.tests.reference
    }
    assert found == {
        *(f"HumanEval/{i}" for i in (14, 15, 83, 100, 130, 139)),
        *(f"Mbpp/{i}" for i in (88, 255, 630)),
    }


def row(**changes):
    test = (
        "import numpy as np\nfrom math import inf\n"
        + plus._IS_FLOATS
        + next(s for s, n in plus._COMPARISONS.items() if n == "equal")
        + "\ninputs = [[1, -2.5, {'a': (1,)}], [inf, {1, 2}, set()]]\nresults = [None, 1 + 2j]\n"
        "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(f(*inp), exp, 0.5)\n"
    )
    base = {"task_id": 7, "code": "def f(): pass", "prompt": "Do.", "test": test}
    return base | {"test_list": ["assert f(1) == 2"], "test_imports": []} | changes


def test_parses_inputs_results_and_comparison():
    table = plus.parse("Mbpp/7", row()["test"], base=1)
    assert table.inputs == [[1, -2.5, {"a": (1,)}], [math.inf, {1, 2}, set()]]
    assert [marshal.loads(x) for x in table.expected] == [None, 1 + 2j]
    assert (table.function, table.rule, table.base) == ("f", ("equal", 0.5), 1)


def test_unknown_comparison_is_refused():
    changed = row()["test"].replace("rtol=1e-07", "rtol=1e-02")
    with pytest.raises(UserError, match=r"Mbpp/7: the released test has a form .*its comparison"):
        plus.parse("Mbpp/7", changed)


@pytest.mark.parametrize("source", ["__import__('os')", "f(1)", "x", "[y for y in z]", "{**a}"])
def test_literals_run_no_code(source):
    with pytest.raises(ValueError, match="not a literal"):
        literal(ast.parse(source, mode="eval").body)


def test_hub_name_relative_folder(tmp_path, monkeypatch):
    """`load_dataset` resolves the Hub name to a folder of that name: the real call, offline."""
    folder = tmp_path / "evalplus" / "mbppplus" / "data"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text(json.dumps(row()) + "\n")
    monkeypatch.chdir(tmp_path)
    suite = load_suite("mbpp+")
    assert suite.tasks["Mbpp/7"].tests.inputs[0] == [1, -2.5, {"a": (1,)}]
    assert suite.source == "evalplus/mbppplus"
    assert load_suite("mbpp+", tmp_path).tasks.keys() == suite.tasks.keys()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_local_file(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    opener = gzip.open if suffix.endswith("gz") else open
    with opener(path, "wt") as file:
        file.write(json.dumps(row()) + "\n")
    task = load_suite("mbpp+", path).tasks["Mbpp/7"]
    assert task.prompt == '"""\nDo.\nassert f(1) == 2\n"""\n'
    assert task.entry_point == "f"


def test_errors_name_the_right_thing(tmp_path):
    with pytest.raises(UserError, match=r"unknown suite 'humanevl\+' \(did you mean 'humaneval\+'"):
        load_suite("humanevl+")
    with pytest.raises(UserError, match="neither MbppPlus-OriginFmt"):
        load_suite("mbpp+", tmp_path)
    wrong = tmp_path / "x.jsonl"
    wrong.write_text('{"task_id": 1}\n')
    with pytest.raises(
        UserError, match="no column 'code'; mbpp\\+ is read in the schema of evalplus"
    ):
        load_suite("mbpp+", wrong)
    wrong.write_text("not json\n")
    with pytest.raises(UserError, match="not JSON lines"):
        load_suite("mbpp+", wrong)
