"""The program in a model's answer: fenced or bare code, with prose, tests or damage around it.

Everything is decided by `ast` on whole lines. Every line is parsed a bounded number of times, so the
time is linear in the answer.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_FENCES = ("```", "~~~")
_PYTHON = ("", "python", "py", "python3", "py3")
_STARTS = ("def ", "async def ", "class ", "import ", "from ", "@")
_TRIES = 8  # how often a region that does not parse is made longer before it is given up


@dataclass(frozen=True)
class _Block:
    lines: list[str]
    tree: ast.Module


def extract(answer: str, entry_point: str) -> str:
    """The program that an answer gives for `entry_point`.

    The last fenced block that defines the entry point is taken, with what it needs from other
    blocks; without one, the part of the text that is code. Imports, helpers, decorators and
    constants stay; top-level tests go. When nothing parses, the text itself is returned, and when
    no function has the right name, the code as it is: the verdict will say so.

    Args:
        answer: what the model wrote; for a base model, the prompt and its continuation.
        entry_point: the function asked for.
    """
    text = answer.encode("utf-8", "replace").decode()  # no source has halves of surrogate pairs
    lines = text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    whole = _parsed(lines)
    # Code with a fence in its docstring parses as it stands; so does prose that happens to be code.
    if whole is not None and entry_point in _defined(whole.tree):
        return _without_tests(whole, entry_point)
    blocks = list(_blocks(lines))
    with_entry = [b for b in blocks if entry_point in _defined(b.tree)]
    if with_entry:
        return _without_tests(_completed(with_entry[-1], blocks), entry_point)
    bare = _salvaged(lines)
    if bare is not None and entry_point in _defined(bare.tree):
        return _without_tests(bare, entry_point)
    found = [b for b in (*blocks, *([bare] if bare else [])) if _defined(b.tree)]
    if found:
        return _without_tests(max(found, key=lambda b: len(b.lines)), entry_point)
    return answer


def _parsed(lines: list[str]) -> _Block | None:
    """`lines` as a block if they are Python; tabs become spaces when they are not consistent."""
    for attempt in (lines, [line.replace("\t", "    ") for line in lines]):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _Block(attempt, ast.parse("\n".join(attempt)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            if not any("\t" in line for line in lines):
                return None
    return None


def _blocks(lines: list[str]) -> Iterator[_Block]:
    """Fenced blocks that are Python, or that hold some; also text up to a fence never opened."""
    fences = [i for i, line in enumerate(lines) if line.lstrip().startswith(_FENCES)]
    if fences and _info(lines[fences[0]]) == "":
        # An answer that continues a prompt ending in an open fence closes it first.
        leading = _parsed(lines[: fences[0]])
        if leading is not None and leading.tree.body:
            yield leading
    position = 0
    while position < len(fences):
        start = fences[position]
        indent = len(lines[start]) - len(lines[start].lstrip())
        ahead = range(position + 1, min(position + 1 + 2 * _TRIES, len(fences)))
        ends = [j for j in ahead if _closes(lines[fences[j]], lines[start])]
        block, next_position = None, position + 1
        # A fence in a docstring closes nothing: the first end at which the block parses is its own.
        for j in ends[:_TRIES]:
            block = _parsed([line[indent:] for line in lines[start + 1 : fences[j]]])
            if block is not None:
                next_position = j + 1
                break
        if block is None:
            end = fences[ends[0]] if ends else len(lines)
            next_position = ends[0] + 1 if ends else len(fences)
            block = _salvaged([line[indent:] for line in lines[start + 1 : end]])
        if block is not None and _info(lines[start]) in _PYTHON:
            yield block
        position = next_position


def _info(line: str) -> str:
    words = line.strip().strip("`~").split()
    return words[0].lower() if words else ""


def _closes(line: str, opening: str) -> bool:
    text, mark = line.strip(), opening.strip()[:3]
    return text.startswith(mark) and not text.strip(mark[0])


def _salvaged(lines: list[str]) -> _Block | None:
    """The statements that can be read from text which as a whole is not Python.

    The text is cut before each unindented line that begins a definition or an import; a piece that
    does not parse loses its tail (prose, or a cut-off end) or is joined to the next one (an
    unindented line inside a string).
    """
    starts = [i for i, line in enumerate(lines) if line.startswith(_STARTS)]
    kept: list[str] = []
    position = 0
    while position < len(starts):
        start = starts[position]
        piece, position = _piece(lines, starts, start, position)
        kept += piece
    return _parsed(kept) if kept else None


def _piece(lines: list[str], starts: list[int], start: int, position: int) -> tuple[list[str], int]:
    """Lines of the statement at `start`, and the index of the next start to look at."""
    for ahead in range(1, _TRIES + 1):
        end = starts[position + ahead] if position + ahead < len(starts) else len(lines)
        piece = lines[start:end]
        if _parsed(piece) is not None:
            return piece, position + ahead
        shorter = _shortened(piece)
        if shorter:
            return shorter, position + ahead
        if end == len(lines):
            break
    return [], position + 1


def _shortened(piece: list[str]) -> list[str]:
    """`piece` up to the first unindented line after its own head, if that parses."""
    body = False
    for i, line in enumerate(piece):
        if line.startswith((" ", "\t")):
            body = True
        elif (
            line.strip() and i and (body or not piece[0].startswith(("@", "def", "class", "async")))
        ):
            return piece[:i] if _parsed(piece[:i]) is not None else []
    return []


def _defined(tree: ast.Module) -> set[str]:
    """Names that the top level of a program binds by def, class or assignment."""
    names: set[str] = set()
    for node in _top_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(t.id for t in targets if isinstance(t, ast.Name))
    return names


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body)
            yield from _top_level(node.orelse)


def _bound(tree: ast.Module) -> set[str]:
    imports = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return imports | _defined(tree)


def _loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _completed(block: _Block, blocks: list[_Block]) -> _Block:
    """`block` after the definitions and imports of other blocks that it uses and lacks."""
    missing = _loaded(block.tree) - _bound(block.tree)
    added: list[str] = []
    for other in blocks:
        if other is block or not missing & _bound(other.tree):
            continue
        for node in other.tree.body:
            names = _bound(ast.Module(body=[node], type_ignores=[]))
            if names & missing:
                first, last = _span(node)
                added += other.lines[first - 1 : last]
                missing = (missing - names) | (_loaded(node) & _bound(other.tree))
    if not added:
        return block
    return _parsed([*added, *block.lines]) or block


def _span(node: ast.stmt) -> tuple[int, int]:
    """First and last line, decorators included, counted from 1."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return first, node.end_lineno or node.lineno


def _without_tests(block: _Block, entry_point: str) -> str:
    """The source without top-level statements that only try the program out."""
    own = {
        n.name
        for n in _top_level(block.tree.body)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    } | {entry_point}
    body = block.tree.body
    tests = [node for node in body if _is_test(node, own)]
    dropped = {id(node) for node in tests}
    kept = [node for node in body if id(node) not in dropped]
    used = set().union(*map(_loaded, kept)) if kept else set()
    # `result = f(3)` belongs to the tests unless something that stays reads it.
    tests += [n for n in kept if _is_unused_call(n, own, used)]
    dropped = {id(node) for node in tests}
    held = _lines(node for node in body if id(node) not in dropped)
    gone = _lines(tests) - held
    return "\n".join(x for i, x in enumerate(block.lines, 1) if i not in gone).strip("\n") + "\n"


def _lines(nodes: Iterable[ast.stmt]) -> set[int]:
    return {i for node in nodes for i in range(_span(node)[0], _span(node)[1] + 1)}


def _is_test(node: ast.stmt, own: set[str]) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Expr):
        call = node.value
        printed = isinstance(call, ast.Call) and ast.unparse(call.func) in (
            "print", "unittest.main", "doctest.testmod", "pytest.main",
        )  # fmt: skip
        return printed or bool(_loaded(call) & own)
    if isinstance(node, ast.If):
        main = "__name__" in _loaded(node.test)
        return main or all(_is_test(n, own) for n in (*node.body, *node.orelse))
    if isinstance(node, ast.For | ast.While | ast.With):
        return all(_is_test(n, own) or _assigns_call(n, own) for n in node.body)
    return False


def _assigns_call(node: ast.stmt, own: set[str]) -> bool:
    return isinstance(node, ast.Assign) and bool(_loaded(node.value) & own)


def _is_unused_call(node: ast.stmt, own: set[str], used: set[str]) -> bool:
    if not isinstance(node, ast.Assign) or not _assigns_call(node, own):
        return False
    if not any(isinstance(n, ast.Call) for n in ast.walk(node.value)):
        return False
    targets = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return not targets & used
