"""Connections: they must say what they want, and what is wrong with it is told as everywhere else."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from decode.server.answers import error_response
from decode.server.errors import ApiError

HEAD_TIMEOUT = 20.0  # seconds for a request's line and headers to arrive


class Connection(H11Protocol):
    """Uvicorn's, closed when a request's head does not arrive whole in `HEAD_TIMEOUT`.

    Uvicorn itself only closes those that send nothing at all behind a request. What it answers by itself, to
    what is not HTTP and to more connections than `limit_concurrency`, would be plain text.
    """

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        full = self._most is not None and len(self.connections) >= self._most
        self.app = _full() if full else self.config.loaded_app
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Tell of what is not HTTP, unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(
                ApiError(400, "the request is not valid HTTP", headers={"Connection": "close"})
            )
            for event in (
                h11.Response(status_code=400, reason=b"Bad Request", headers=response.raw_headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if not self._between_requests():
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        self._deadline = None
        if self._between_requests():
            self.transport.close()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _full() -> Any:
    """The application that refuses."""
    return error_response(
        ApiError(
            503,
            "the server has as many connections as it takes; try again later",
            "server_error",
            code="too_many_connections",
            headers={"Retry-After": "5", "Connection": "close"},
        )
    )
