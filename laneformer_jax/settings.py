"""Run settings: YAML files and `a.b=value` overrides into frozen dataclasses.

Settings are plain `@dataclass(frozen=True)` classes; pydantic reads their annotations. YAML is read
by the 1.2 core rules: `1e-3` is a number, `no` and `off` are text, `010` is not octal.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

import pydantic
import yaml

from laneformer_jax.errors import UserError, nearest

T = TypeVar("T")

_SHOWN_ERRORS = 3


def load(
    cls: type[T], path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()
) -> T:
    """Build the dataclass `cls` from a YAML file and dotted overrides.

    A mapping given for a nested dataclass is laid over that field's default value; anything else
    replaces the default. Unknown keys are refused at every depth.

    Args:
        cls: a frozen dataclass; nested dataclasses, lists and unions of them are understood.
        path: a YAML file holding one mapping; None means defaults only.
        overrides: `train.steps=200` or `data.sources.0.weight=2`; the value is read as YAML, so
            `x=null`, `x=[1,2]` and `x={a: 1}` work. Later ones win.

    Raises:
        UserError: one line naming the file or override, the field, its value and what is allowed.
    """
    data = _with_defaults(cls, {} if path is None else _read(Path(path)))
    given = {}
    for text in overrides:
        key, value = _parse_override(text)
        _assign(data, key, value, text)
        given[key] = text
    return _build(cls, data, "" if path is None else str(path), given)


def from_dict(cls: type[T], data: Mapping[str, Any], source: str = "") -> T:
    """Build the dataclass `cls` from plain data; `source` names it in errors. Raises UserError."""
    return _build(cls, _with_defaults(cls, data), source, {})


def to_dict(obj: Any) -> Any:
    """Plain data (dict, list, str, numbers) of a settings object."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {f.name: to_dict(getattr(obj, f.name)) for f in dataclasses.fields(obj) if f.init}
    if isinstance(obj, Mapping):
        return {key: to_dict(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [to_dict(value) for value in obj]
    if isinstance(obj, enum.Enum):
        return obj.value
    return str(obj) if isinstance(obj, PurePath) else obj


def to_yaml(obj: Any) -> str:
    """YAML text of a settings object; `load` reads it back to an equal one."""
    return yaml.dump(to_dict(obj), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def configs_dir() -> Path:
    """The folder of shipped configs, in a checkout as in an installed wheel."""
    package = Path(__file__).resolve().parent
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(name: str | os.PathLike[str]) -> Path:
    """A config file by path, or by its name under `configs_dir()` with or without `.yaml`.

    Raises:
        UserError: there is no such file; the nearest shipped name is suggested.
    """
    shipped = configs_dir()
    for candidate in (Path(name), shipped / name, shipped / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    names = sorted(str(p.relative_to(shipped).with_suffix("")) for p in shipped.rglob("*.yaml"))
    raise UserError(
        f"config {str(name)!r}: no such file{nearest(str(name), names)}; "
        f"shipped configs: {', '.join(names)}"
    )


# YAML


class _Loader(yaml.SafeLoader):
    """Safe YAML with 1.2 core scalars; duplicate keys are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBER_START = list("-+.0123456789")
_SCALARS: list[tuple[str, str, list[str]]] = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", _NUMBER_START),
    (
        "float",
        r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9][0-9_]*)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _NUMBER_START,
    ),
    ("merge", r"<<", ["<"]),
]
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
        )
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: int(loader.construct_scalar(node).replace("_", ""), 0),
)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    data = _parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold a mapping of settings, not {_show(data)}")
    return data


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{source}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


# Overrides and defaults


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r}: an override has the form name=value, such as train.steps=200")
    return key, _parse(value, repr(text))


def _assign(data: Any, key: str, value: Any, text: str) -> None:
    *parents, last = key.split(".")
    for depth, part in enumerate([*parents, last]):
        where = ".".join(key.split(".")[:depth]) or "the settings"
        if isinstance(data, list):
            if not part.isdecimal() or int(part) >= len(data):
                allowed = f"0 to {len(data) - 1}" if data else "none: the list is empty"
                raise UserError(f"{text!r}: {where} is a list; index {part!r} must be {allowed}")
            part = int(part)  # type: ignore[assignment]
        elif not isinstance(data, dict):
            raise UserError(f"{text!r}: {where} is {_show(data)} and has no field {part!r}")
        elif depth < len(parents) and data.get(part) is None:
            data[part] = {}
        if depth == len(parents):
            data[part] = value
        else:
            data = data[part]


def _with_defaults(cls: Any, data: Any) -> Any:
    """`data` completed with those defaults of `cls` that have parts (dataclasses, lists, dicts)."""
    if not isinstance(data, Mapping):
        return data
    out = dict(data)
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        nested = _dataclasses_in(hints[field.name])
        one = nested[0] if len(nested) == 1 else None
        default = _default(field, one)
        if field.name not in out:
            if isinstance(default, (dict, list)):
                out[field.name] = default
        elif one is not None and isinstance(out[field.name], Mapping) and _is_single(
            hints[field.name]
        ):
            base = default if isinstance(default, dict) else {}
            out[field.name] = _with_defaults(one, _merged(base, out[field.name]))
    return out


def _default(field: dataclasses.Field[Any], nested: Any) -> Any:
    """The default of a field as plain data; a class that is its own factory gives its own defaults,
    so that values it derives from others are derived anew."""
    if field.default is not dataclasses.MISSING:
        return to_dict(field.default)
    if field.default_factory is dataclasses.MISSING:
        return None
    if field.default_factory is nested:
        return _with_defaults(nested, {})
    return to_dict(field.default_factory())


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else value
    return out


# Validation

_Location = tuple[str | int, ...]
_NO_VALUE = object()
_PLAIN_WORDS = {
    "dataclass_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}

@functools.cache
def _adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    # A one-tuple around the class: pydantic takes the config from outside only for types that
    # could not hold one themselves, and hands it down to the dataclasses inside.
    return pydantic.TypeAdapter(
        tuple[cls],  # type: ignore[valid-type]
        config=pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False),
    )


def _build(cls: type[T], data: Any, source: str, given: Mapping[str, str]) -> T:
    try:
        built: T = _adapter(cls).validate_python((data,))[0]
    except pydantic.ValidationError as error:
        # A misspelt field often leaves another one missing: tell the cause first.
        errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] == "missing")
        found = [_explain(cls, data, e, source, given) for e in errors]
    else:
        found = [
            _located(path, "must be a number", source, given, value)
            for path, value in _bools_as_numbers(data, built, ())
        ]
        if not found:
            return built
    found = list(dict.fromkeys(found))
    more = f"; and {len(found) - _SHOWN_ERRORS} more" if len(found) > _SHOWN_ERRORS else ""
    raise UserError("; ".join(found[:_SHOWN_ERRORS]) + more)


def _explain(
    cls: type, data: Any, error: Any, source: str, given: Mapping[str, str]
) -> str:
    path, owner = _resolve(cls, data, error["loc"][1:])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        names = [f.name for f in dataclasses.fields(owner) if f.init]
        hint = nearest(str(path[-1]), names) or f"; allowed: {', '.join(names)}"
        return _located(path, f"unknown field{hint}", source, given)
    if kind in ("missing", "missing_argument"):
        return _located(path, "required, but not given", source, given)
    if kind == "value_error":
        return _own_error(path, owner, str(context["error"]), source, given)
    text = _PLAIN_WORDS.get(kind) or re.sub(r"^Input should be ", "must be ", error["msg"])
    if kind in ("literal_error", "enum"):
        allowed = re.findall(r"'([^']*)'", context["expected"])
        text += nearest(str(error["input"]), allowed)
    return _located(path, text, source, given, error["input"])


def _own_error(
    path: _Location, owner: Any, text: str, source: str, given: Mapping[str, str]
) -> str:
    """An error that a dataclass raised itself: a field it names first becomes part of the path."""
    first = re.match(r"\w+", text)
    if first and first[0] in {f.name for f in dataclasses.fields(owner)}:
        prefix = "".join(f"{part}." for part in path)
        where = _source((*path, first[0]), source, given)
        return f"{where}{prefix}{text}"
    return _located(path, text, source, given)


def _located(
    path: _Location, text: str, source: str, given: Mapping[str, str], value: Any = _NO_VALUE
) -> str:
    name = ".".join(map(str, path))
    shown = "" if value is _NO_VALUE else f" = {_show(value)}"
    return f"{_source(path, source, given)}{name}{shown}{': ' if name else ''}{text}"


def _source(path: _Location, source: str, given: Mapping[str, str]) -> str:
    name = ".".join(map(str, path))
    for key, text in given.items():
        if name == key or name.startswith(key + ".") or (name and key.startswith(name + ".")):
            return f"{text!r}: "
    return f"{source}: " if source else ""


def _resolve(
    cls: type, data: Any, location: _Location
) -> tuple[_Location, Any]:
    """The dotted path of a pydantic location and the dataclass that holds its end.

    Pydantic puts the names of union members and of schema steps into a location; what is neither a
    field of the dataclass nor a key or index of the data at that place is such a name.
    """
    path: list[str | int] = []
    owner: Any = cls
    types: list[Any] = [cls]
    for index, part in enumerate(location):
        last = index == len(location) - 1
        classes = [c for t in types for c in _dataclasses_in(t)]
        holder = next(
            (c for c in classes if part in {f.name for f in dataclasses.fields(c)}), None
        )
        in_data = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if holder is not None:
            owner, types = holder, [_hints(holder)[part]]
        elif in_data and isinstance(part, int):
            pass
        elif in_data:
            owner = classes[0] if classes else owner
            types = [] if last else types
        else:
            named = [c for c in classes if c.__name__ == part]
            types = named or types
            continue
        path.append(part)
        if in_data:
            data = data[part]
        else:
            data = None
    if location and path and owner is not None:
        inner = [c for t in types for c in _dataclasses_in(t)]
        # The location ends at a dataclass: an error that the class raised itself is about it.
        if len(inner) == 1 and isinstance(data, dict):
            owner = inner[0]
    return tuple(path), owner


def _bools_as_numbers(
    data: Any, built: Any, path: _Location
) -> list[tuple[_Location, bool]]:
    """Where `true` or `false` was given for a number: pydantic would take 1 or 0 for it."""
    if isinstance(data, bool):
        wrong = isinstance(built, (int, float)) and not isinstance(built, bool)
        return [(path, data)] if wrong else []
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(data, Mapping) and dataclasses.is_dataclass(built):
        pairs = ((k, v, getattr(built, k)) for k, v in data.items())
    elif isinstance(data, Mapping) and isinstance(built, Mapping):
        pairs = ((k, v, built.get(k)) for k, v in data.items())
    elif isinstance(data, list) and isinstance(built, (list, tuple)):
        pairs = ((i, v, b) for i, (v, b) in enumerate(zip(data, built, strict=True)))
    return [found for k, v, b in pairs for found in _bools_as_numbers(v, b, (*path, k))]


# Types


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _dataclasses_in(annotation: Any) -> list[Any]:
    """Every dataclass that an annotation such as `list[A] | B | None` mentions."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [c for arg in typing.get_args(annotation) for c in _dataclasses_in(arg)]


def _is_single(annotation: Any) -> bool:
    """Whether an annotation is a dataclass or `dataclass | None`, not a container of them."""
    options = [a for a in typing.get_args(annotation) or (annotation,) if a is not type(None)]
    return len(options) == 1 and dataclasses.is_dataclass(options[0]) and (
        typing.get_origin(annotation) not in (list, tuple, dict)
    )


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
