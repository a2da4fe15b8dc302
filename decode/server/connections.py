"""Connections that must say what they want: a client that sends half a request head takes up a place."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 20.0  # seconds for a request's line and headers to arrive


class Connection(H11Protocol):
    """Uvicorn's, closed when a request's head does not arrive whole in `HEAD_TIMEOUT`.

    Uvicorn itself only closes those that send nothing at all behind a request.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

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
