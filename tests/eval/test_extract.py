import gc
import time

import pytest

from eval.extract import extract

F = "```"
RIGHT = "def f(x):\n    return x + 1\n"


def value(source, x=1):
    names = {}
    exec(source, names)
    return names["f"](x)


ANSWERS = {
    "bare": RIGHT,
    "fenced": f"Sure!\n{F}python\n{RIGHT}{F}\nThat is it.",
    "fenced without a language": f"{F}\n{RIGHT}{F}",
    "tildes": f"~~~python\n{RIGHT}~~~",
    "indented block": f"1. So:\n   {F}python\n   def f(x):\n       return x + 1\n   {F}\n",
    "unclosed fence": f"Here:\n{F}python\n{RIGHT}",
    "fence opened in the prompt": f"{RIGHT}{F}\nThis adds one.",
    "closing fence with text after it": f"{F}python\n{RIGHT}{F}\n\nAnd isn't it nice?\n",
    "fence in a docstring": (
        f'{F}python\ndef f(x):\n    """Adds.\n\n    {F}\n    f(1)\n    {F}\n    """\n'
        f"    return x + 1\n{F}\n"
    ),
    "bare with a fence in its docstring": f'def f(x):\n    """\n{F}\nf(1)\n{F}\n    """\n    return x + 1\n',
    "usage in a second block": f"{F}python\n{RIGHT}{F}\nUse:\n{F}python\nprint(f(1))\n{F}",
    "corrected in a second block": (
        f"{F}python\ndef f(x):\n    return x\n{F}\nNo:\n{F}python\n{RIGHT}{F}"
    ),
    "helper in another block": (
        f"{F}python\ndef add(a, b):\n    return a + b\n{F}\nthen\n"
        f"{F}python\ndef f(x):\n    return add(x, 1)\n{F}"
    ),
    "import in another block": (
        f"{F}python\nimport operator\n{F}\n{F}python\ndef f(x):\n    return operator.add(x, 1)\n{F}"
    ),
    "shell block first": f"{F}bash\npip install x\n{F}\n{F}python\n{RIGHT}{F}",
    "prose around bare code": f"Here is the code:\n\n{RIGHT}\nIt's simple, isn't it?\n",
    "cut off in a later function": f"{RIGHT}\ndef g(x):\n    return (1 +",
    "cut off in a fence": f"{F}python\n{RIGHT}\ndef g(x):\n    return [1,",
    "three thousand lines": (
        f"{F}python\n" + "".join(f"K{i} = {i}\n" for i in range(3000)) + f"{RIGHT}{F}\nDone."
    ),
    "windows line ends": RIGHT.replace("\n", "\r\n"),
    "byte order mark": "\ufeff" + RIGHT,
    "tabs": "def f(x):\n\tif x:\n\t\treturn x + 1\n\treturn 1\n",
    "tabs and spaces": "def f(x):\n\tif x:\n        return x + 1\n\treturn 1\n",
    "decorated": "import functools\n\n@functools.lru_cache(maxsize=None)\ndef f(x):\n    return x + 1\n",
    "guarded import": "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n" + RIGHT,
    "augmented constant": "N = 0\nN += 1\ndef f(x):\n    return x + N\n",
    "defined twice": "def f(x):\n    return 0\n" + RIGHT,
    "lambda": "f = lambda x: x + 1\n",
    "table built by a loop": "T = {}\nfor i in range(9):\n    T[i] = i + 1\ndef f(x):\n    return T[x]\n",
    "recursion limit": "import sys\nsys.setrecursionlimit(5000)\n" + RIGHT,
    "asserts": RIGHT + "assert f(1) == 3\nassert f(2) == 5\n",
    "prints": RIGHT + "print(f(undefined))\n",
    "main": RIGHT + 'if __name__ == "__main__":\n    raise SystemExit(f(1))\n',
    "main call": RIGHT + "def main():\n    raise ValueError\nmain()\n",
    "result kept": RIGHT + "result = f(undefined)\nprint(result)\n",
    "loop of tests": RIGHT + "for i in range(3):\n    print(f(i))\n    assert f(i) == 0\n",
    "unittest": RIGHT + "import unittest\nunittest.main()\n",
    "semicolons": "import math; K = 1\ndef f(x): return x + K\n",
    "half of a surrogate pair": f"Wow \ud83d\n{F}python\ndef f(x):\n    s = '\ud83d'\n    return x + 1\n{F}",
    "escaped surrogate": 'def f(x):\n    s = "\\ud800"\n    return x + 1\n',
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", ANSWERS)
def test_finds_the_program(name):
    assert value(extract(ANSWERS[name], "f")) == 2


def test_keeps_what_the_program_needs():
    got = extract(ANSWERS["decorated"], "f")
    assert "lru_cache" in got
    assert "import functools" in got
    assert "assert" not in extract(ANSWERS["asserts"], "f")


@pytest.mark.parametrize(
    "answer", [f"{F}python\ndef other(x):\n    return 1\n{F}", "def other(x):\n    return 1\n"]
)
def test_wrong_name_is_kept_as_it_is(answer):
    assert extract(answer, "f") == "def other(x):\n    return 1\n"


def test_helper_and_wrong_name_are_kept():
    code = (
        "import math\n\ndef helper(x):\n    return x + 1\n\ndef other(x):\n    return helper(x)\n"
    )
    got = extract(f"This\tshould do:\n{F}python\n{code}print(other(1))\n{F}\nRun it!", "f")
    assert got.startswith(code.rstrip())
    names = {}
    exec(got, names)
    assert names["other"](1) == 2


@pytest.mark.parametrize("answer", ["", "I cannot help with that.", "(" * 500, "\0", F])
def test_no_program(answer):
    assert extract(answer, "f") == answer


@pytest.mark.parametrize(
    "many",
    [
        lambda n: RIGHT + "".join(f"x{i} = {i}\n" for i in range(n)),
        lambda n: RIGHT + "assert f(1) == 2\n" * n,
        lambda n: f"{F}python\n{F}\n" * (n // 2) + RIGHT,
        lambda n: "def g(x):\n    return (\n" * (n // 2) + RIGHT,
        lambda n: "import os\nand some prose\n" * (n // 2) + RIGHT,
        lambda n: "prose about nothing\n" * n + f"{F}python\n{RIGHT}{F}",
        lambda n: f"{F}python\ndef g(:\n" * (n // 2) + RIGHT,
    ],
)
def test_time_is_linear(many):
    """Four times the lines take about four times as long; quadratic code takes sixteen.

    Without the garbage collector: what it costs depends on what other tests have left in this process.
    """

    def seconds(n):
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            extract(many(n), "f")
            best = min(best, time.process_time() - began)
        return best

    gc.disable()
    try:
        small, large = seconds(1_500), seconds(6_000)
    finally:
        gc.enable()
    assert large < 10 * small + 0.05
    assert large < 10


def test_docstring_longer_than_any_window():
    answer = f'{F}python\ndef f(x):\n    """' + "line\n    " * 3000 + f'"""\n    return x + 1\n{F}'
    assert value(extract(answer, "f")) == 2
