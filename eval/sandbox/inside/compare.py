"""When a result counts as right: the comparison of EvalPlus 0.3.1, on decoded data.

A rule is a tuple of a name and its parameters:

    ("equal", atol)      ==, or numpy.allclose with rtol 1e-7 where floats are expected
    ("set", atol)        as sets
    ("presence",)        a bool as it is, anything else by whether it is not None
    ("root", atol)       HumanEval/32: a zero of the polynomial in the arguments
    ("surface",)         Mbpp/581: or with the height read as the pyramid's
    ("digits",)          Mbpp/558: or with the shorter number padded by zeros
"""

from __future__ import annotations

import cmath
import math
from typing import Any

RTOL = 1e-7
FLOAT_ATOL = 1e-6


def right(rule: tuple[Any, ...], arguments: list[Any], out: Any, expected: Any) -> bool:
    """Whether `out` is a right result of a call with `arguments`.

    Raises whatever comparing such values raises; the caller counts that as wrong.
    """
    name = rule[0]
    if name == "presence":
        return bool(expected == (out if isinstance(out, bool) else out is not None))
    if name == "root":
        (coefficients,) = arguments
        return abs(sum(c * math.pow(out, i) for i, c in enumerate(coefficients))) <= rule[1]
    atol = rule[1] if name in ("equal", "set") else 0
    same = set(out) == set(expected) if name == "set" else out == expected
    if same or _also_right(name, arguments, out):
        return True
    if atol == 0 and _is_floats(expected):
        atol = FLOAT_ATOL
    return bool(atol) and _close(out, expected, atol)


def _also_right(name: str, arguments: list[Any], out: Any) -> bool:
    if name == "surface":
        edge, height = arguments
        slant = math.sqrt((edge / 2) ** 2 + height**2)
        return bool(out == round(edge**2 + 4 * (edge * slant) / 2))
    if name == "digits":
        first, second = str(arguments[0]), str(arguments[1])
        width = max(len(first), len(second))
        pairs = zip(first.zfill(width), second.zfill(width), strict=True)
        return bool(out == sum(abs(int(a) - int(b)) for a, b in pairs))
    return False


def _is_floats(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(x, float) for x in value)
    return isinstance(value, float)


def _close(out: Any, expected: Any, atol: float) -> bool:
    """numpy.allclose without broadcasting: same types and lengths, as EvalPlus asks."""
    if type(out) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)):
        return len(out) == len(expected) and all(
            _close_inside(o, e, atol) for o, e in zip(out, expected, strict=True)
        )
    return _close_number(out, expected, atol)


def _close_inside(out: Any, expected: Any, atol: float) -> bool:
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(out, (list, tuple))
            and len(out) == len(expected)
            and all(_close_inside(o, e, atol) for o, e in zip(out, expected, strict=True))
        )
    return _close_number(out, expected, atol)


def _close_number(out: Any, expected: Any, atol: float) -> bool:
    for value in (out, expected):
        if not isinstance(value, (bool, int, float, complex)):
            return False
    if out == expected:
        return True
    if not (cmath.isfinite(out) and cmath.isfinite(expected)):
        return False
    return abs(out - expected) <= atol + RTOL * abs(expected)
