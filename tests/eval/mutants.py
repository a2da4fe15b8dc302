"""Programs that are nearly right: canonical solutions with one change in the syntax tree each.

The same mutants on every Python and machine: choices depend on the task id only.
"""

import ast
import copy
import random

COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.FloorDiv,
    ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip


def mutants(task_id, source, count):
    """`count` different mutants of `source`, or as many as there are."""
    tree = ast.parse(source)
    places = [
        (index, change) for index, node in enumerate(ast.walk(tree)) for change in changes(node)
    ]
    random.Random(task_id).shuffle(places)
    found, seen = [], {ast.unparse(tree)}
    for index, change in places:
        new = copy.deepcopy(tree)
        change(list(ast.walk(new))[index])
        text = ast.unparse(ast.fix_missing_locations(new))
        if text not in seen:
            seen.add(text)
            found.append(text)
        if len(found) == count:
            break
    return found


def changes(node):
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        yield lambda n: n.ops.__setitem__(0, COMPARE[type(n.ops[0])]())
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield lambda n: setattr(n, "op", ARITHMETIC[type(n.op)]())
    if isinstance(node, ast.BoolOp):
        yield lambda n: setattr(n, "op", ast.Or() if isinstance(n.op, ast.And) else ast.And())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda n: setattr(n, "value", not n.value)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Return) and node.value is not None:
        yield lambda n: setattr(n, "value", ast.Tuple([n.value], ast.Load()))
    if isinstance(node, ast.Call) and len(node.args) > 1:
        yield lambda n: n.args.reverse()
