"""Python values as marshal format 2: no references, no code, the same bytes for the same value.

`marshal.dumps` writes it at C speed. Nobody calls `marshal.loads` on what a candidate sends: equal
bytes mean equal values, and the rest is read by `decode.py`. What marshal has no tag for becomes a
tuple that starts with `...`:

    (..., "Fraction", numerator, denominator)
    (..., "Decimal", text)
    (..., "object", type name)    equal to nothing
"""

from __future__ import annotations

import marshal
import sys
from itertools import chain

TYPE_CHECKING = False  # typing and collections take longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERSION = 2
CHUNK = 1000  # elements of a long list encoded at a time: little enough for the processor's cache
MAX_DEPTH = 100
_HEADER = 5  # bytes of a list's or tuple's tag and length

_SCALARS = (bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_EXACT = frozenset((*_SCALARS, *_CONTAINERS, type(None), type(...)))
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()))


def pieces(value: Any) -> Iterator[bytes]:
    """The encoding of `value` in consecutive pieces, so that no large one is held whole."""
    if type(value) not in (list, tuple) or len(value) <= CHUNK:
        yield _dumps(value)
        return
    yield (b"[" if type(value) is list else b"(") + len(value).to_bytes(4, "little")
    for start in range(0, len(value), CHUNK):
        yield _dumps(list(value[start : start + CHUNK]))[_HEADER:]


def _dumps(value: Any) -> bytes:
    # marshal writes anything with a buffer, such as a numpy number, as its raw bytes.
    if "numpy" in sys.modules and not _is_exact(value):
        value = plain(value)
    try:
        return marshal.dumps(value, VERSION)
    except (ValueError, RecursionError):
        return marshal.dumps(plain(value), VERSION)


def _is_exact(value: Any) -> bool:
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH or not _EXACT.issuperset(map(type, level)):
            return False
        inner = [x.items() if type(x) is dict else x for x in level if type(x) in _CONTAINERS]
        level, depth = list(chain.from_iterable(inner)), depth + 1
    return True


def plain(value: Any, depth: int = 0) -> Any:
    """`value` rebuilt from the types marshal knows; subclasses become their base type."""
    kind = type(value)
    if value is None or value is ... or kind in _SCALARS:
        return value
    if depth > MAX_DEPTH:
        return _opaque("nested too deeply")
    if kind in _VIEWS:
        return {plain(x, depth + 1) for x in value}
    for base in _CONTAINERS:
        if issubclass(kind, base):
            if base is dict:
                return {plain(k, depth + 1): plain(v, depth + 1) for k, v in dict.items(value)}
            return base([plain(x, depth + 1) for x in base.__iter__(value)])
    for scalar, exact in (
        (int, int.__index__),
        (float, float.__float__),
        (complex, complex.__pos__),
        (str, str.__str__),
        (bytes, bytes.__bytes__),
    ):
        if issubclass(kind, scalar):
            return exact(value)
    return _foreign(value, kind, depth)


def _foreign(value: Any, kind: type, depth: int) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return plain(value.item(), depth + 1) if kind is not numpy.void else _opaque("numpy.void")
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == "fractions.Fraction":
        return (..., "Fraction", int(value.numerator), int(value.denominator))
    if name == "decimal.Decimal":
        return (..., "Decimal", str(value))
    return _opaque(name)


def _opaque(name: str) -> tuple[Any, ...]:
    return (..., "object", str(name)[:200])
