"""Run settings: YAML files and `a.b=value` overrides into frozen dataclasses.

Settings are plain `@dataclass(frozen=True)` classes; pydantic reads their annotations. YAML is read
by the rules of `yaml12`.
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

from laneformer_jax import yaml12
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
    data = _completed(cls, {} if path is None else yaml12.read_mapping(Path(path)))
    return _build(cls, data, "" if path is None else str(path), _apply(data, overrides))


def replace(obj: T, overrides: Iterable[str]) -> T:
    """A copy of a settings object with dotted overrides laid over it. Raises UserError as `load`."""
    data = to_dict(obj)
    return _build(type(obj), data, "", _apply(data, overrides))


def from_dict(cls: type[T], data: Mapping[str, Any], source: str = "") -> T:
    """Build the dataclass `cls` from plain data; `source` names it in errors. Raises UserError."""
    return _build(cls, _completed(cls, data), source, {})


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
    return yaml12.dump(to_dict(obj))


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


# Overrides and defaults


def _apply(data: Any, overrides: Iterable[str]) -> dict[str, str]:
    """Set the overrides in `data`; gives the text of each by its key."""
    given = {}
    for text in overrides:
        key, value = _parse_override(text)
        _assign(data, key, value, text)
        given[key] = text
    return given


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r}: an override has the form name=value, such as train.steps=200")
    return key, yaml12.parse(value, repr(text))


def _assign(data: Any, key: str, value: Any, text: str) -> None:
    """Set the dotted `key` of plain `data` to `value`, making missing mappings on the way."""
    parts = key.split(".")
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth])
        index: Any = part
        if isinstance(data, list):
            if not part.isdecimal() or int(part) >= len(data):
                allowed = f"0 to {len(data) - 1}" if data else "none, for it is empty"
                raise UserError(f"{text!r}: {where} is a list, its indices are {allowed}")
            index = int(part)
        elif not isinstance(data, dict):
            raise UserError(f"{text!r}: {where} is {_show(data)} and has no field {part!r}")
        if depth == len(parts) - 1:
            data[index] = value
        elif isinstance(data, dict) and data.get(index) is None:
            data[index] = {}
        data = data[index]


def _completed(annotation: Any, data: Any, base: Any = None) -> Any:
    """`data` laid over `base`, with those defaults of its dataclasses that have parts.

    Scalar defaults are left to the dataclass; parts must be there for overrides to point into.
    """
    options = [a for a in typing.get_args(annotation) or (annotation,) if a is not type(None)]
    container = typing.get_origin(annotation)
    if container in (list, tuple) and isinstance(data, list):
        return [_completed(options[0], item) for item in data]
    if container is dict and isinstance(data, Mapping):
        return {key: _completed(options[1], value) for key, value in data.items()}
    cls = options[0]
    if len(options) > 1 or cls not in _dataclasses_in(cls) or not isinstance(data, Mapping):
        return data
    base = base if isinstance(base, Mapping) else {}
    out = {**base, **data}
    for name, hint in _hints(cls).items():
        field = cls.__dataclass_fields__.get(name)
        if field is None or not field.init:
            continue
        default = base[name] if name in base else _default(field, hint)
        if name in data:
            out[name] = _completed(hint, data[name], default)
        elif isinstance(default, (dict, list)):
            out[name] = default
    return out


def _default(field: dataclasses.Field[Any], annotation: Any) -> Any:
    """The default of a field as plain data.

    A class that is its own factory gives the class's defaults, so that what it derives from other
    fields is derived anew.
    """
    if field.default is not dataclasses.MISSING:
        return to_dict(field.default)
    if field.default_factory is dataclasses.MISSING:
        return None
    if field.default_factory in _dataclasses_in(annotation):
        return _completed(field.default_factory, {})
    return to_dict(field.default_factory())


# Validation

_Location = tuple[str | int, ...]
_NO_VALUE = object()
_PLAIN_WORDS = {
    "dataclass_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "int_parsing_size": "is too large",
}


@functools.cache
def _adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    # A one-tuple around the class: pydantic takes the config from outside only for types that
    # could not hold one themselves, and hands it down to the dataclasses inside.
    return pydantic.TypeAdapter(tuple[cls], config=pydantic.ConfigDict(extra="forbid"))


def _build(cls: Any, data: Any, source: str, given: Mapping[str, str]) -> Any:
    try:
        built = _adapter(cls).validate_python((data,))[0]
    except pydantic.ValidationError as error:
        # A misspelt field often leaves another one missing: tell the cause first.
        errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] == "missing")
        found = [
            _located(path, "must be a number", source, given, value)
            for path, value in _bools_in(data)
            if _is_number(cls, data, path)  # which may be why the rest does not fit together
        ] or [_explain(cls, data, e, source, given) for e in errors]
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


def _explain(cls: Any, data: Any, error: Any, source: str, given: Mapping[str, str]) -> str:
    """One pydantic error as one clause."""
    kind, context, location = error["type"], error.get("ctx", {}), error["loc"][1:]
    if kind == "unexpected_keyword_argument":
        path, here = _resolve(cls, data, location[:-1])
        names = [f.name for c in here for f in dataclasses.fields(c) if f.init]
        hint = nearest(str(location[-1]), names) or f"; allowed: {', '.join(names)}"
        return _located((*path, location[-1]), f"unknown field{hint}", source, given)
    path, here = _resolve(cls, data, location)
    if kind in ("missing", "missing_argument"):
        item = f"item {location[-1]} is " if isinstance(location[-1], int) else ""
        return _located(path, f"{item}required, but not given", source, given)
    if kind == "value_error":
        return _own_error(path, here, str(context["error"]), source, given)
    text = _PLAIN_WORDS.get(kind) or re.sub(r"^Input should be ", "must be ", error["msg"])
    if kind in ("literal_error", "enum"):
        allowed = re.findall(r"'([^']*)'", context["expected"])
        text += nearest(str(error["input"]), allowed)
    return _located(path, text, source, given, error["input"])


def _own_error(
    path: _Location, here: list[Any], text: str, source: str, given: Mapping[str, str]
) -> str:
    """An error that a dataclass raised itself: a field it names first becomes part of the path."""
    if path:
        text = text.removeprefix(f"{path[-1]}.")
    named = re.match(r"\w+(\.\w+)*", text)
    parts = named[0].split(".") if named else [""]
    if any(parts[0] in _hints(c) for c in here):
        prefix = "".join(f"{part}." for part in path)
        return f"{_source((*path, *parts), source, given)}{prefix}{text}"
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


def _resolve(cls: Any, data: Any, location: _Location) -> tuple[_Location, list[Any]]:
    """The dotted path of a pydantic location, and the dataclasses that may stand at its end.

    Pydantic also puts names of union members and schema steps into a location: whatever is neither
    a field of the dataclass nor a key or index of the data at that place. These are left out.
    """
    path: list[str | int] = []
    here = [cls]
    for part in location:
        hint = next((_hints(c)[part] for c in here if part in _hints(c)), None)
        if hint is not None:
            here = _dataclasses_in(hint)
        elif not _holds(data, part):
            here = [c for c in here if c.__name__ == part] or here
            continue
        data = data[part] if _holds(data, part) else None
        path.append(part)
    return tuple(path), here


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, Mapping) and part in data


def _bools_in(data: Any, path: _Location = ()) -> list[tuple[_Location, bool]]:
    if isinstance(data, bool):
        return [(path, data)]
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, Mapping):
        pairs = data.items()
    elif isinstance(data, list):
        pairs = enumerate(data)
    return [found for k, v in pairs for found in _bools_in(v, (*path, k))]


def _is_number(cls: Any, data: Any, path: _Location) -> bool:
    """Whether the field at `path` takes numbers, and neither a bool nor anything."""
    _, here = _resolve(cls, data, path[:-1])
    hints = [_hints(c)[path[-1]] for c in here if path and path[-1] in _hints(c)]
    kinds = {kind for hint in hints for kind in (hint, *typing.get_args(hint))}
    return bool(kinds & {int, float}) and not kinds & {bool, Any}


def _bools_as_numbers(data: Any, built: Any, path: _Location) -> list[tuple[_Location, bool]]:
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


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
