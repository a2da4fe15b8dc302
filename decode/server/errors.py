"""Errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laneformer_jax.errors import UserError

_LONGEST = 500  # characters of what a client is told


class ApiError(Exception):
    """What a client is told when its request gets no answer.

    Message and parameter may quote what the client sent: `_line` makes them fit to send.

    Args:
        status: of the HTTP response.
        message: what is wrong, and what would be right.
        kind: OpenAI's `type`.
        param: the parameter that is wrong.
        code: for programs.
        headers: to add to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind = status, _line(message), kind
        self.param = None if param is None else _line(param)
        self.code, self.headers = code, headers or {}

    def body(self) -> dict[str, Any]:
        """`{"error": …}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def _line(text: str) -> str:
    """One line that UTF-8 can hold: line breaks, other control characters and lone surrogates as escapes.

    Of a long one the middle is left out.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def from_user_error(error: UserError, names: Mapping[str, str]) -> ApiError:
    """A 400 that names the parameter, where the message begins with one.

    names: what the engine calls by another name than the client.
    """
    text = str(error)
    code = "context_length_exceeded" if "the context of" in text else None
    head, colon, rest = text.partition(":")
    name = head.split("[")[0].split(".")[0]
    if colon and name.isidentifier():
        param = names.get(name, name)
        return ApiError(400, f"{param}{head[len(name) :]}:{rest}", param=param, code=code)
    tokens = names["max_new_tokens"]
    return ApiError(400, text.replace("max_new_tokens", tokens), param=tokens, code=code)


def shutting_down() -> ApiError:
    """A 503 for what is not begun, or not finished in time, when the server ends."""
    return ApiError(
        503,
        "the server is shutting down",
        "server_error",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def internal() -> ApiError:
    """A 500; what happened is in the server's log."""
    return ApiError(
        500, "the server failed on this request; its log says why", "server_error", code="internal"
    )
