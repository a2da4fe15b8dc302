"""How an answer goes out: whole or as server-sent events; who goes away is let go of."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decode.server.errors import ApiError
from decode.server.jobs import End, Job, Part, Worker
from decode.server.replies import Reply

_log = logging.getLogger("laneformer.serve")
_KEEP_ALIVE = 10.0  # seconds between comments while nothing else is sent
_STALLED = 60.0  # seconds in which a client must take what is sent


class _Following(Response):
    """Follows a job, and lets go of it when the client goes away."""

    def __init__(self, worker: Worker, job: Job, reply: Reply):
        self.background = None
        self._worker, self._job, self._reply = worker, job, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: dict[str, Any]) -> None:
            async with asyncio.timeout(_STALLED):
                await send(message)

        watch = asyncio.create_task(self._watch(receive))
        try:
            await self.follow(scope, receive, sent)
        except (TimeoutError, OSError):
            _log.info("a client stopped reading")
        finally:
            watch.cancel()
            self._worker.cancel(self._job)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(self._job)

    async def follow(self, scope: Scope, receive: Receive, send: Any) -> None:
        raise NotImplementedError


class Whole(_Following):
    """One JSON object."""

    async def follow(self, scope: Scope, receive: Receive, send: Any) -> None:
        while isinstance(event := await self._job.events.get(), Part):
            self._reply.add(event)
        if event.error is not None:
            response = error_response(event.error)
        elif event.outcome == "cancelled":
            return
        else:
            response = json_response(self._reply.body())
        await response(scope, receive, send)


class Stream(_Following):
    """Server-sent events: a chunk per part, `[DONE]` at the end, an error in its place if one came.

    While the request waits, comments say how many are before it; OpenAI's clients skip them.
    """

    def __init__(self, worker: Worker, job: Job, reply: Reply, before: int):
        super().__init__(worker, job, reply)
        self._before = before

    async def follow(self, scope: Scope, receive: Receive, send: Any) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # nginx would collect the stream
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(text: str, more: bool = True) -> None:
            body = text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await write(f": {self._before} before\n\n" + _events(self._reply.opening()))
        while not isinstance(event := await self._next(write), End):
            if text := _events(self._reply.chunks(event)):
                await write(text)
        if event.error is not None:
            await write(_events([event.error.body()]))
        elif event.outcome != "cancelled":
            await write(_events(self._reply.closing()))
        await write("data: [DONE]\n\n", more=False)

    async def _next(self, write: Callable[[str], Awaitable[None]]) -> Part | End:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_ALIVE):
                    return await self._job.events.get()
            await write(f": {self._worker.before(self._job)} before\n\n")


def _events(objects: Iterable[Any]) -> str:
    return "".join(f"data: {_dump(value)}\n\n" for value in objects)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_dump(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """A response in OpenAI's format."""
    return json_response(error.body(), error.status, error.headers)
