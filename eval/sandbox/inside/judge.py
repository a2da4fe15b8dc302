"""The judge: decodes hostile results and compares them, in a process with nothing to lose.

It runs under the same confinement as a candidate, with one difference: it is reused, so a result
that kills it costs a restart and counts as wrong.
"""

from __future__ import annotations

import marshal
import random
import reprlib
import sys
from typing import Any

from .channel import CALL, VALUE, Channel
from .compare import right
from .decode import DecodeError, decode

SEED = 0


class Refused(Exception):
    """The candidate raised instead of returning; the test fails."""


def run(channel: Channel, options: dict[str, Any]) -> None:
    """Answer requests until the parent closes the pipe; verdicts are `+` or `-` and a reason.

    Requests: `("compare", rule, arguments, result, expected)` with the last three encoded, and
    `("script", helpers, test, entry point)`, during which calls of the candidate are sent to the
    parent as `CALL` frames and answered by `(True, encoded value)` or `(False, message)`.
    """
    sys.setrecursionlimit(5000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    while True:
        request = channel.receive()
        reason = compare(*request[1:]) if request[0] == "compare" else script(channel, *request[1:])
        channel.send(VALUE, b"+" if reason is None else b"-" + reason.encode("utf-8", "replace"))


def compare(rule: Any, arguments: bytes, result: bytes, expected: bytes) -> str | None:
    """None when `result` is right, else what it is."""
    try:
        out = decode(result)
    except (DecodeError, MemoryError, RecursionError) as error:
        return f"a result that cannot be read ({error})"
    try:
        # The arguments and the expected value come from the parent.
        if right(rule, marshal.loads(arguments), out, marshal.loads(expected)):
            return None
    except Exception as error:
        return f"{short(out)}, which cannot be compared ({type(error).__name__})"
    return short(out)


def script(channel: Channel, helpers: str, test: str, entry_point: str) -> str | None:
    """Run a test from the data set with the candidate's functions replaced by remote calls."""
    last: list[str] = []

    def ask(*request: Any) -> Any:
        shown = request[1] if request[0] == "eval" else f"{request[1]}{short_args(request[2])}"
        last[:] = [shown]
        channel.send(CALL, marshal.dumps(request, 2))
        answered, payload = channel.receive()
        if not answered:
            raise Refused(payload)
        value = decode(payload)
        last.append(short(value))
        return value

    names: dict[str, Any] = {
        "__name__": "test",
        "candidate": lambda *arguments: ask("call", entry_point, arguments),
        "evaluate_in_candidate": lambda source: ask("eval", source),
    }
    random.seed(SEED)
    try:
        exec(compile(helpers, "<helpers>", "exec", dont_inherit=True), names)
        names[entry_point] = names["candidate"]  # one test calls it by its own name
        exec(compile(test, "<test>", "exec", dont_inherit=True), names)
    except Refused as error:
        return f"{last[0]} raised {error}"
    except AssertionError:
        return f"{last[0]} returned {last[1]}" if len(last) == 2 else "assertion failed"
    except Exception as error:
        called = f" after {last[0]}" if last else ""
        return f"{type(error).__name__}: {str(error)[:300]}{called}"
    return None


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Decimal digits take quadratic time.
        return super().repr_int(x, level) if x.bit_length() <= 4096 else f"<{x.bit_length()} bits>"


_repr = _Repr()
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxdict = 20
_repr.maxstring = _repr.maxother = _repr.maxlong = 200


def short(value: Any) -> str:
    """A repr of at most about 400 characters."""
    text = _repr.repr(value)
    return text if len(text) <= 400 else text[:400] + "…"


def short_args(arguments: Any) -> str:
    """Arguments as they stand in a call."""
    return "(" + ", ".join(short(a) for a in arguments) + ")"
