"""Read marshal format 2 from an untrusted sender: data only, bounded depth, no marshal.loads."""

from __future__ import annotations

import struct
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from .encode import MAX_DEPTH

_FLOAT, _COMPLEX = struct.Struct("<d"), struct.Struct("<dd")
_END = object()
_CONSTANTS = {ord("N"): None, ord("T"): True, ord("F"): False, ord("."): ...}


class DecodeError(ValueError):
    """The bytes are not an encoded value."""


class Opaque:
    """A result of a type that crosses no process border; equal to nothing."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def decode(data: bytes) -> Any:
    """The value that `encode.pieces` wrote.

    Raises:
        DecodeError: malformed, truncated, nested too deeply, or followed by more bytes.
    """
    reader = _Reader(data)
    try:
        value = reader.value(0)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, OverflowError) as error:
        raise DecodeError(str(error)) from None
    if value is _END or reader.position != len(data):
        raise DecodeError("not one value")
    return value


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.position = data, 0

    def take(self, length: int) -> bytes:
        start = self.position
        if length < 0 or start + length > len(self.data):
            raise DecodeError("truncated")
        self.position = start + length
        return self.data[start : self.position]

    def size(self) -> int:
        return int.from_bytes(self.take(4), "little", signed=True)

    def value(self, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH:
            raise DecodeError("nested too deeply")
        tag = self.data[self.position]
        self.position += 1
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == 105:  # i
            return self.size()
        if tag == 117:  # u
            return self.take(self.size()).decode("utf-8", "surrogatepass")
        if tag == 103:  # g
            return _FLOAT.unpack(self.take(8))[0]
        if tag in (40, 91):  # ( [
            items = self.items(depth)
            return _special(tuple(items)) if tag == 40 else items
        if tag == 123:  # {
            return self.mapping(depth)
        if tag == 60:  # <
            return set(self.items(depth))
        if tag == 62:  # >
            return frozenset(self.items(depth))
        if tag == 108:  # l
            return self.long()
        if tag == 121:  # y
            return complex(*_COMPLEX.unpack(self.take(16)))
        if tag == 115:  # s
            return self.take(self.size())
        if tag == 48:  # 0
            return _END
        raise DecodeError(f"unknown tag {tag}")

    def items(self, depth: int) -> list[Any]:
        count = self.size()
        if not 0 <= count <= len(self.data) - self.position:
            raise DecodeError("truncated")
        items = [self.value(depth + 1) for _ in range(count)]
        if any(item is _END for item in items):
            raise DecodeError("stray end")
        return items

    def mapping(self, depth: int) -> dict[Any, Any]:
        found = {}
        while (key := self.value(depth + 1)) is not _END:
            item = self.value(depth + 1)
            if item is _END:
                raise DecodeError("stray end")
            found[key] = item
        return found

    def long(self) -> int:
        count = self.size()
        digits = struct.unpack(f"<{abs(count)}H", self.take(2 * abs(count)))
        if any(digit >> 15 for digit in digits) or not digits:
            raise DecodeError("bad digit")
        # A power-of-two base is read in linear time.
        value = int("".join(f"{digit:015b}" for digit in reversed(digits)), 2)
        return -value if count < 0 else value


def _special(items: tuple[Any, ...]) -> Any:
    if not items or items[0] is not ...:
        return items
    match items:
        case (_, "Fraction", int(numerator), int(denominator)) if denominator:
            return Fraction(numerator, denominator)
        case (_, "Decimal", str(text)):
            try:
                return Decimal(text)
            except InvalidOperation:
                raise DecodeError("not a Decimal") from None
        case (_, "object", str(name)):
            return Opaque(name)
    raise DecodeError("unknown special value")
