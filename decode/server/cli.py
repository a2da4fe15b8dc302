"""`laneformer serve`: OpenAI's HTTP interface to a checkpoint, and a page to try it.

One request is answered at a time, as fast as the model goes; the others wait in the order they came.
Only this machine can reach it unless --host says otherwise. SIGTERM or Ctrl-C ends it: what is being
answered may finish within --grace seconds, what waits is told.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from decode import options

if TYPE_CHECKING:
    from decode.engine import Engine
    from decode.server.app import Service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="0: any free one (default %(default)s)"
    )
    parser.add_argument("--name", help="the model's name for clients (default: the checkpoint's)")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys, one a line, one of which clients must send (or the variable LANEFORMER_API_KEY)",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="requests that may wait (default 256)",
    )
    parser.add_argument(
        "--max-body",
        type=int,
        default=4 << 20,
        metavar="BYTES",
        help="of a request (default 4 MiB)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens of one answer (default: what the context leaves)",
    )
    parser.add_argument(
        "--max-answers",
        type=int,
        default=64,
        metavar="N",
        help="most answers, prompts times n, of one request (default 64)",
    )
    parser.add_argument(
        "--grace", type=float, default=10.0, metavar="SECONDS", help="see above (default 10)"
    )


def run(args: argparse.Namespace) -> int:
    from laneformer_jax.errors import UserError

    for flag in ("max_queue", "max_body", "max_new_tokens", "max_answers"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')}: {value} must be at least 1")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port: {args.port} must be from 0 to 65535")
    if not 0 <= args.grace <= 86400:
        raise UserError(f"--grace: {args.grace} must be from 0 to 86400 seconds")
    if args.name is not None and not (args.name.strip() and args.name.isprintable()):
        raise UserError(f"--name: {args.name!r} must be text that can be shown")
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed; `pip install 'laneformer-jax[serve]'` brings it"
        ) from None
    from decode.server import security

    keys = security.load_keys(args.api_key_file)
    listener = _listen(args.host, args.port)  # what is wrong with it is told before the model loads
    began = time.perf_counter()

    from decode.server.app import Limits, Service
    from decode.server.connections import Connection

    with options.without_collector():
        loaded, engine = options.load(args)
        _warm_up(engine)
    gc.freeze()  # what is there stays: the search for garbage need not look through it during an answer
    limits = Limits(args.max_queue, args.max_body, args.max_new_tokens, args.max_answers)
    loopback = security.is_loopback(args.host)
    service = Service(
        loaded, engine, args.name or options.name_of(args.checkpoint), limits, keys, loopback
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"serving {service.name} at http://{shown}:{port} (ready in {time.perf_counter() - began:.1f} s)",
        file=sys.stderr,
        flush=True,
    )
    if not loopback and not keys:
        print(
            "warning: other machines can reach it, and no API key is set (--api-key-file)",
            file=sys.stderr,
            flush=True,
        )
    config = uvicorn.Config(
        service.app(),
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=args.max_queue + 256,
        timeout_graceful_shutdown=int(args.grace) + 5,
    )
    return _serve(config, service, listener, args.grace)


def _warm_up(engine: Engine) -> None:
    """Compile what most requests need: the likeliest token or a drawn one, with all of the context."""
    from decode.request import Request, Sampling

    prompt = [0] * max(1, min(16, engine.context - 1))
    for temperature in (0.0, 1.0):
        asked = Request(prompt, engine.context, Sampling(temperature=temperature), overflow="cut")
        bursts = engine.stream(asked)
        next(bursts)  # of one token
        next(bursts, None)


def _listen(host: str, port: int) -> socket.socket:
    from laneformer_jax.errors import UserError

    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port} ({error.strerror}); --port 0 takes any free one"
        ) from None
    return listener


def _serve(config: Any, service: Service, listener: socket.socket, grace: float) -> int:
    import asyncio

    import uvicorn

    class Server(uvicorn.Server):
        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            self._loop = asyncio.get_running_loop()
            await super().serve(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            super().handle_exit(sig, frame)
            # Not from here: the signal may have interrupted whoever holds the queue's lock.
            self._loop.call_soon_threadsafe(service.worker.close)
            self._loop.call_soon_threadsafe(
                self._loop.call_later, grace, service.worker.cancel_active
            )

    # uvicorn raises the signal again when it is done; ending was what it asked for.
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: None)
    Server(config).run([listener])
    if not service.worker.join(5.0):
        # The device does not answer, and a thread in it would keep the process.
        sys.stderr.flush()
        os._exit(0)
    return 0
