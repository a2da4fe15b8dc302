"""The routes. Every error is JSON in OpenAI's format, and nothing a client sends ends the server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import laneformer_jax
from decode.complete import Ask, ask
from decode.engine import Engine
from decode.server import page, security
from decode.server.answers import Stream, Whole, error_response
from decode.server.errors import ApiError, from_user_error, internal
from decode.server.jobs import Job, Worker
from decode.server.metrics import Metrics
from decode.server.replies import ChatReply, CompletionReply, Reply
from decode.server.schema import ChatRequest, CompletionRequest, parse
from laneformer_jax.checkpoint.load import Loaded
from laneformer_jax.errors import UserError, nearest


@dataclass(frozen=True)
class Limits:
    """What one client may ask for, and how much waits.

    Args:
        queue: requests that may wait.
        body: bytes of a request's body.
        new_tokens: of one answer; None: what the context leaves.
        answers: prompts times n of one request.
    """

    queue: int = 256
    body: int = 4 << 20
    new_tokens: int | None = None
    answers: int = 64


class Service:
    """A model, its queue, and who may use them.

    Args:
        name: what clients call the model.
        keys: API keys, any of which opens; none: no key is asked for.
        only_loopback: refuse requests that call this machine by another name than localhost.
    """

    def __init__(
        self,
        loaded: Loaded,
        engine: Engine,
        name: str,
        limits: Limits | None = None,
        keys: Sequence[bytes] = (),
        only_loopback: bool = True,
    ):
        self.loaded, self.engine, self.name = loaded, engine, name
        self.limits, self.keys = limits or Limits(), tuple(keys)
        self.only_loopback = only_loopback
        self.created = int(time.time())
        self.metrics = Metrics()
        self.worker = Worker(engine, loaded.tokenizer, self.metrics, self.limits.queue)

    def app(self) -> Starlette:
        """The ASGI application."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            self.worker.close()
            self.worker.cancel_active()

        handlers: dict[Any, Any] = {
            HTTPException: _http_error,
            ApiError: _api_error,
            Exception: _unexpected,
        }
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._open(self._metrics_text)),
                Route("/v1/models", self._open(self._models)),
                Route("/v1/models/{name:path}", self._open(self._model)),
                Route(
                    "/v1/completions",
                    self._answering("completions", CompletionRequest),
                    methods=["POST"],
                ),
                Route(
                    "/v1/chat/completions",
                    self._answering("chat", ChatRequest),
                    methods=["POST"],
                ),
            ],
            exception_handlers=handlers,
            lifespan=lifespan,
        )

    # What tells ------------------------------------------------------------------------------

    def _page(self, request: Request) -> Response:
        security.check_host(request, self.only_loopback)
        return Response(page.HTML, headers=page.HEADERS, media_type="text/html")

    def _health(self, request: Request) -> Response:
        alive = self.worker.alive
        body = {
            "status": "ok" if alive else "unavailable",
            "model": self.name,
            "queue": self.worker.waiting,
            "version": laneformer_jax.__version__,
        }
        return JSONResponse(body, 200 if alive else 503)

    def _open(
        self, handler: Callable[[Request], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            security.check_host(request, self.only_loopback)
            security.check_key(request, self.keys)
            return handler(request)

        return checked

    def _metrics_text(self, request: Request) -> Response:
        media = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(), media_type=media)

    def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "laneformer",
            "context_window": self.engine.context,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"model: {name!r} is not served here{nearest(name, [self.name])}; it is {self.name!r}",
                param="model",
                code="model_not_found",
            )

    # What answers ----------------------------------------------------------------------------

    def _answering(self, endpoint: str, schema: Any) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            received = time.perf_counter()
            try:
                security.check_host(request, self.only_loopback)
                security.check_key(request, self.keys)
                body = await security.read_json_body(request, self.limits.body)
                asked = parse(schema, body)
                self._check_model(asked.model)
                # Tokenizing a long prompt takes a while; streams go on meanwhile.
                asks = await run_in_threadpool(self._asks, asked)
                job = Job(asks, endpoint, received)
                reply = self._reply(job, asked)
                before = self.worker.submit(job)
            except ApiError as error:
                outcome = "rejected" if error.status in (429, 503) else "invalid"
                self.metrics.requests.labels(endpoint, outcome).inc()
                raise
            except ClientDisconnect:
                self.metrics.requests.labels(endpoint, "cancelled").inc()
                return Response(status_code=499)
            if asked.stream:
                return Stream(self.worker, job, reply, before)
            return Whole(self.worker, job, reply)

        return answer

    def _asks(self, asked: CompletionRequest | ChatRequest) -> list[Ask]:
        """The requests to the engine. Raises ApiError."""
        prompts: list[Any]
        if isinstance(asked, ChatRequest):
            prompts = [[message.plain() for message in asked.messages]]
            if asked.top_logprobs is not None and not asked.logprobs:
                raise ApiError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
            logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
            given = asked.max_completion_tokens, asked.max_tokens
            name = "max_tokens" if given[0] is None else "max_completion_tokens"
            tokens = given[1] if given[0] is None else given[0]
        else:
            prompts, logprobs = list(asked.prompts()), asked.logprobs
            name, tokens = "max_tokens", asked.max_tokens
        if len(prompts) * asked.n > self.limits.answers:
            raise ApiError(
                400,
                f"n: {len(prompts) * asked.n} answers; at most {self.limits.answers}",
                param="n",
            )
        most = self.limits.new_tokens
        if most is not None and tokens is not None and tokens > most:
            raise ApiError(400, f"{name}: {tokens} must be at most {most} here", param=name)
        try:
            return [
                ask(
                    self.loaded,
                    self.engine,
                    prompt,
                    most if tokens is None else tokens,
                    overflow="cut" if tokens is None else "refuse",
                    stop=asked.stop,
                    ignore_eos=asked.ignore_eos,
                    stop_token_ids=asked.stop_token_ids,
                    sampling=asked.sampling(logprobs),
                    n=asked.n,
                    speculate=asked.speculate,
                )
                for prompt in prompts
            ]
        except UserError as error:
            source = "messages" if isinstance(asked, ChatRequest) else "prompt"
            names = {"max_new_tokens": name} | dict.fromkeys(
                ("prompt", "prompt_ids", "text"), source
            )
            raise from_user_error(error, names) from None

    def _reply(self, job: Job, asked: CompletionRequest | ChatRequest) -> Reply:
        options = asked.stream_options
        if options is not None and not asked.stream:
            raise ApiError(400, "stream_options: needs stream: true", param="stream_options")
        kind = ChatReply if isinstance(asked, ChatRequest) else CompletionReply
        return kind(
            job,
            self.loaded.tokenizer,
            self.name,
            logprobs=job.asks[0].request.sampling.logprobs is not None,
            usage=options is not None and options.include_usage,
            running=options is not None and options.continuous_usage_stats,
        )


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    told = {
        404: f"{path}: nothing is here; try /v1/chat/completions",
        405: f"{path}: {request.method} is not allowed",
    }.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, told, headers=dict(error.headers or {})))


def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(internal())
