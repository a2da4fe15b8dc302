"""The running Python's own standard library: real code on every machine, without a download."""

from __future__ import annotations

import ast
import functools
import os
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from data.config import SourceConfig
from data.sources import Record
from data.sources.files import TextFiles, walk
from data.sources.names import hash_names
from laneformer_jax.errors import UserError

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_MIN_DOCSTRING, _MAX_FUNCTION = 20, 4000  # characters


def stdlib_files(config: SourceConfig) -> TextFiles:
    """The library's `.py` files, by path below its folder."""
    root = sysconfig.get_paths()["stdlib"]
    return TextFiles([root], [(0, n) for n in _names(root, config.include_tests)])


class StdlibPairs:
    """Functions of the library: `prompt` asks for one by signature and docstring, `response` is it.

    A pair is held out with the file it was cut from. `text` is both, as a comment and code, for
    pretraining on documented code.

    Args:
        pairs: file, line, prompt and response of each.
    """

    def __init__(self, pairs: list[tuple[str, int, str, str]]):
        self._pairs = pairs

    @classmethod
    def cut(cls, config: SourceConfig) -> StdlibPairs:
        """Cut the pairs of every file."""
        root = sysconfig.get_paths()["stdlib"]
        names = _names(root, config.include_tests)
        return cls([pair for name in names for pair in _pairs(root, name)])

    def __len__(self) -> int:
        return len(self._pairs)

    def where(self, index: int) -> str:
        name, line, _, _ = self._pairs[index]
        return f"{name}:{line}"

    def __getitem__(self, index: int) -> Record:
        _, _, prompt, response = self._pairs[index]
        return {
            "prompt": prompt,
            "response": response,
            "text": "".join(f"# {line}".rstrip() + "\n" for line in prompt.split("\n"))
            + f"{response}\n",
        }

    def name_hashes(self) -> np.ndarray:
        return hash_names([name for name, _, _, _ in self._pairs])

    def revision(self) -> dict[str, Any]:
        return {"python": sys.version, "pairs": len(self._pairs)}


@functools.lru_cache(maxsize=4)
def _names(root: str, include_tests: bool) -> tuple[str, ...]:
    left_out = _NOT_LIBRARY if include_tests else _NOT_LIBRARY | _TEST_FOLDERS
    names = tuple(sorted(n for n in walk(root, left_out) if n.endswith(".py")))
    if not names:
        raise UserError(
            f"source 'stdlib': {root} holds no Python source; install it, or name files"
        )
    return names


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions in order of the source, nested ones too; expressions are not searched."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _functions(child)


@functools.lru_cache(maxsize=8192)
def _pairs(root: str, name: str) -> tuple[tuple[str, int, str, str], ...]:
    try:
        with open(os.path.join(root, name), encoding="utf-8") as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return ()  # the library holds files that are broken on purpose
    lines = source.splitlines(keepends=True)
    pairs = []
    for node in _functions(tree):
        docstring = ast.get_docstring(node)
        # A function of nothing but a docstring teaches to answer with nothing.
        if docstring is None or len(docstring) < _MIN_DOCSTRING or len(node.body) < 2:
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        function = textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
        if len(function) > _MAX_FUNCTION:
            continue
        signature = f"{node.name}({ast.unparse(node.args)})"
        prompt = f"Write a Python function `{signature}`.\n\n{docstring}"
        pairs.append((name, node.lineno, prompt, function))
    return tuple(pairs)
