"""Values of literal expressions in a data set's tests, without evaluating code."""

from __future__ import annotations

import ast
import math
from typing import Any

_NAMES = {"inf": math.inf, "nan": math.nan}


def literal(node: ast.expr) -> Any:
    """The value of a literal; beyond `ast.literal_eval`, `inf`, `nan` and `set()`.

    Raises:
        ValueError: `node` is anything else.
    """
    # By type and not by match: a test may hold a hundred thousand nodes.
    kind = type(node)
    if kind is ast.Constant:
        return node.value  # type: ignore[attr-defined]
    if kind is ast.List:
        return [literal(x) for x in node.elts]  # type: ignore[attr-defined]
    if kind is ast.Tuple:
        return tuple([literal(x) for x in node.elts])  # type: ignore[attr-defined]
    if kind is ast.UnaryOp and isinstance(node.op, ast.USub):  # type: ignore[attr-defined]
        return -literal(node.operand)  # type: ignore[attr-defined]
    if isinstance(node, ast.Dict) and all(node.keys):
        keys = [literal(k) for k in node.keys if k is not None]
        return dict(zip(keys, map(literal, node.values), strict=True))
    if isinstance(node, ast.Set):
        return {literal(x) for x in node.elts}
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        left, right = literal(node.left), literal(node.right)
        return left + right if isinstance(node.op, ast.Add) else left - right
    if isinstance(node, ast.Call) and ast.unparse(node) == "set()":
        return set()
    raise ValueError(f"not a literal: {ast.unparse(node)[:80]}")
