"""Who may ask, and how much they may send."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request

from decode.server.errors import ApiError
from laneformer_jax.errors import UserError
from laneformer_jax.files import parse_json

KEY_VARIABLE = "LANEFORMER_API_KEY"
BODY_TIMEOUT = 60.0  # seconds for a whole body to arrive


def load_keys(file: Path | None) -> tuple[bytes, ...]:
    """API keys from a file, one a line, or else from LANEFORMER_API_KEY; none: everyone may ask.

    Raises:
        UserError: the file cannot be read or holds no key, or the variable is empty.
    """
    if file is not None:
        try:
            keys = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
        except OSError as error:
            raise UserError(f"--api-key-file: {file}: cannot be read ({error.strerror})") from None
        if not keys:
            raise UserError(f"--api-key-file: {file}: holds no key")
        return tuple(keys)
    key = os.environb.get(KEY_VARIABLE.encode())
    if key is not None and not key.strip():
        raise UserError(f"{KEY_VARIABLE}: is set but empty; unset it to serve without a key")
    return () if key is None else (key.strip(),)


def check_key(request: Request, keys: Sequence[bytes]) -> None:
    """Raises ApiError 401 unless the request bears one of `keys`, or none are needed."""
    if not keys:
        return
    given = next((v for k, v in request.scope["headers"] if k == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    # All are compared, over bytes, so that the time taken tells nothing and any header is compared.
    matches = [hmac.compare_digest(key.strip(), known) for known in keys]
    if scheme.lower() != b"bearer" or not any(matches):
        told = "wrong API key" if given else "no API key given; send `Authorization: Bearer KEY`"
        raise ApiError(401, told, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def is_loopback(host: str) -> bool:
    """Whether an address to listen on, or the host of a Host header, is this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(request: Request, only_loopback: bool) -> None:
    """Raises ApiError 403 when a loopback server is called by another name.

    A page elsewhere can point a name of its own at 127.0.0.1 and so read answers (DNS rebinding).
    """
    if not only_loopback:
        return
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if not is_loopback(name.lower()):
        raise ApiError(403, f"host {name!r} is not served here; use localhost", code="wrong_host")


async def read_json_body(request: Request, most: int) -> Any:
    """The JSON of a request's body.

    Raises:
        ApiError: 413 as soon as more than `most` bytes are announced or have come, 415 for another
            content type, 408 when it takes too long, 400 for what is not JSON.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # Forms of other pages cannot send this type unasked.
        raise ApiError(
            415, f"Content-Type must be application/json, not {media or 'nothing'!r}", param=None
        )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT:.0f} s") from None
    return _json(bytes(body))


def _too_large(most: int) -> ApiError:
    # The rest is not read: the connection ends.
    return ApiError(
        413,
        f"the body is larger than {most} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _json(body: bytes) -> Any:
    if not body.strip():
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        return parse_json(body, "the body")
    except UserError as error:
        raise ApiError(400, str(error), code="invalid_json") from None
