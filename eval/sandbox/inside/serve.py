"""Load a candidate's program and call its functions on request."""

from __future__ import annotations

import os
import sys
import types
from itertools import chain

from .channel import DIGEST, ERROR, VALUE, Channel
from .encode import pieces

TYPE_CHECKING = False  # typing and collections take longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

MODULE = "candidate"
FILE = "<program>"
KEPT = 64 << 20  # bytes; of a longer result only its size and digest are sent


def run(channel: Channel, options: dict[str, Any]) -> None:
    """Execute `options["program"]`, then answer requests until the parent closes the pipe.

    Requests: `("map", function, list of argument lists)` sends one value per element and stops at
    the first exception; `("call", function, arguments)`; `("eval", expression)`.
    """
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    names = module.__dict__
    try:
        exec(compile(options.pop("program"), FILE, "exec", dont_inherit=True), names)
    except BaseException as error:
        channel.send(ERROR, _told(error))
        os._exit(0)
    channel.send(VALUE, b"N")
    while True:
        request = channel.receive()
        try:
            if request[0] == "map":
                function = names[request[1]] if request[1] in names else _missing(request[1])
                for arguments in request[2]:
                    _reply(channel, function(*arguments))
            elif request[0] == "call":
                function = names[request[1]] if request[1] in names else _missing(request[1])
                _reply(channel, function(*request[2]))
            else:
                code = compile(request[1], "<test>", "eval", dont_inherit=True)
                _reply(channel, eval(code, names))
        except BaseException as error:
            channel.send(ERROR, _told(error))


def _reply(channel: Channel, value: Any) -> None:
    held: list[bytes] = []
    size, rest = 0, pieces(value)
    for piece in rest:
        held.append(piece)
        size += len(piece)
        if size > KEPT:
            channel.send(DIGEST, _digest(chain(held, rest)))
            return
    channel.send(VALUE, held[0] if len(held) == 1 else b"".join(held))


def _digest(encoding: Iterable[bytes]) -> bytes:
    """Size (8 bytes) and SHA-256. A program that forges it has to know the right result."""
    from hashlib import sha256  # takes longer to import than all the rest

    size, sha = 0, sha256()
    for piece in encoding:
        size += len(piece)
        sha.update(piece)
    return size.to_bytes(8, "little") + sha.digest()


def _missing(name: str) -> Any:
    raise NameError(f"the program defines no {name!r}")


def _told(error: BaseException) -> bytes:
    """`Type: message (line 3)`, at most 2,000 bytes."""
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == FILE:
            line = frame.tb_lineno
        frame = frame.tb_next
    if isinstance(error, SyntaxError) and error.filename == FILE:
        line = error.lineno or 0
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException:
        text = "?"
    told = f"{type(error).__name__}: {text[:1000]}" + (f" (line {line})" if line else "")
    return told.encode("utf-8", "backslashreplace")[:2000]
