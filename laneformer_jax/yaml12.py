"""YAML by the 1.2 core rules, on pyyaml, which knows only 1.1.

`1e-3` is a number (1.1: text), `no`, `off`, `12:30` and `2024-01-01` are text, `010` is not octal.
Duplicate keys are refused. What `dump` writes, `parse` reads back equal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from laneformer_jax.errors import UserError

_DEEPEST = 100


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file gives `{}`.

    Raises:
        UserError: the file cannot be read, is not YAML, or holds something other than a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    data = parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold a mapping of settings, holds {type(data).__name__}")
    return data


def parse(text: str, source: str) -> Any:
    """Plain data of YAML text. Raises UserError naming `source`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{source}{where}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: not valid YAML: {reason}") from None


def dump(data: Any) -> str:
    """YAML text of plain data, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Reading costs the square of the depth, so that a few kilobytes could take minutes.
        if self._depth == _DEEPEST:
            raise yaml.composer.ComposerError(
                problem=f"nested more than {_DEEPEST} deep",
                problem_mark=self.peek_event().start_mark,
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node).replace("_", ""), 0)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Line breaks of other kinds than "\n" survive only as escapes.
        style = '"' if any(c in data for c in "\r\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_NUMBER_START = list("-+.0123456789")
_SCALARS: list[tuple[str, str, list[str]]] = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", _NUMBER_START),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9]*)([eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _NUMBER_START,
    ),
    ("merge", r"<<", ["<"]),
]
# The dumper has the same rules, so that it quotes text that would be read as something else.
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Dumper.add_representer(str, _Dumper.represent_str)
