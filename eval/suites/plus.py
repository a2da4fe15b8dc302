"""The `test` column of EvalPlus's Hub data sets, read by `ast`: inputs, results, comparison."""

from __future__ import annotations

import ast
import gc
import marshal

from eval.suites.literal import literal
from eval.suites.types import Reference, Rule, Table
from laneformer_jax.errors import UserError

_IS_FLOATS = """
def is_floats(x) -> bool:
    # check if it is float; List[float]; Tuple[float]
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False
"""
# The comparisons the data sets use, and our name for each. One that is not here is refused, so
# that a new release of a data set cannot be judged by the wrong rule.
_COMPARISONS = {
    """
def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match
""": "equal",
    """
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
""": "equal",
    """
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    out = set(out)
    exp = set(exp)
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
""": "set",
    # As released: computes the match and never asserts it.
    """
def assertion(out, exp, atol):
    if isinstance(out, bool):
        exact_match = out == exp
    else:
        exact_match = exp == (out is not None)
""": "presence",
    # As released, HumanEval/32: the arguments are swapped and the sign is lost.
    "assert _poly(*candidate(*inp), inp) <= 0.0001": "root",
}


def _shape(node: ast.AST) -> str:
    return ast.dump(node)


_KNOWN = {_shape(ast.parse(source).body[0]): name for source, name in _COMPARISONS.items()}
_FLOATS = _shape(ast.parse(_IS_FLOATS).body[0])


def parse(task_id: str, source: str, rule: Rule | None = None, base: int | None = None) -> Table:
    """Read one `test`.

    Args:
        rule: overrides the comparison found, where the released one is wrong.
        base: leading inputs that are the original benchmark's.

    Raises:
        UserError: the test is not of a form known to this version.
    """
    # A test is up to a hundred thousand nodes, none of them garbage: collecting costs a third.
    gc.disable()
    try:
        return _parse(task_id, source, rule, base)
    finally:
        gc.enable()


def _parse(task_id: str, source: str, rule: Rule | None, base: int | None) -> Table:
    body = ast.parse(source).body
    wrapped = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    statements = wrapped[0].body if wrapped else body
    values = {
        n.targets[0].id: n.value
        for n in statements
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    }
    loops = [n for n in statements if isinstance(n, ast.For)]
    if "inputs" not in values or len(loops) != 1 or len(loops[0].body) != 1:
        raise _unknown(task_id, "no inputs and loop")
    step = loops[0].body[0]
    functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
    function, name, atol, reference = _step(task_id, step, functions, body)
    results = values.get("results")
    inputs = literal(values["inputs"])
    expected = None
    if reference is None:
        if results is None:
            raise _unknown(task_id, "no results")
        expected = [marshal.dumps(x, 2) for x in literal(results)]
        # zip in the released loop: what has no partner is not tested
        inputs, expected = inputs[: len(expected)], expected[: len(inputs)]
    found = (name, atol) if name in ("equal", "set", "root") else (name,)
    return Table(function, [list(x) for x in inputs], expected, rule or found, base, reference)


def entry_point(source: str) -> str:
    """The function that the loop at the end of an MBPP+ test calls."""
    start = source.rindex("\nfor ")
    loop = ast.parse(source[start + 1 :]).body[0]
    match loop:
        case ast.For(body=[ast.Expr(value=ast.Call(args=[ast.Call(func=ast.Name(id=name)), *_]))]):
            return name
    raise _unknown("?", "no call in the loop")


def _step(
    task_id: str, step: ast.stmt, functions: dict[str, ast.FunctionDef], body: list[ast.stmt]
) -> tuple[str, str, float, Reference | None]:
    """Function under test, comparison, tolerance and reference from the loop's one statement."""
    if _KNOWN.get(_shape(step)) == "root":
        return "candidate", "root", 1e-4, None
    match step:
        case ast.Expr(
            value=ast.Call(
                func=ast.Name(id="assertion"),
                args=[
                    ast.Call(func=ast.Name(id=function)),
                    want,
                    ast.Constant(value=int() | float() as atol),
                ],
            )
        ):
            pass
        case _:
            raise _unknown(task_id, f"`{ast.unparse(step)[:80]}`")
    name = _KNOWN.get(_shape(functions["assertion"])) if "assertion" in functions else None
    floats = functions.get("is_floats")
    if name is None or (floats is not None and _shape(floats) != _FLOATS):
        raise _unknown(task_id, "its comparison")
    if isinstance(want, ast.Name):
        return function, name, atol, None
    if not isinstance(want, ast.Call) or not isinstance(want.func, ast.Name):
        raise _unknown(task_id, f"`{ast.unparse(want)[:80]}`")
    mine: list[ast.stmt] = [
        n
        for n in body
        if (isinstance(n, ast.Import | ast.ImportFrom) and ast.unparse(n) != "import numpy as np")
        or (isinstance(n, ast.FunctionDef) and n.name not in ("assertion", "is_floats", "check"))
    ]
    source = ast.unparse(ast.Module(body=mine, type_ignores=[]))
    return function, name, atol, Reference(source, want.func.id)


def _unknown(task_id: str, what: str) -> UserError:
    return UserError(
        f"{task_id}: the released test has a form this version does not know ({what}); "
        "known are HumanEval+ v0.1.10 and MBPP+ v0.2.0 as on the Hub"
    )
