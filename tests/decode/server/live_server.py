"""A server in this process that clients talk to over a socket, and an engine that takes its time."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import uvicorn

from decode.server.app import Limits, Service
from decode.server.connections import Connection


class Slow:
    """The engine, resting after every burst: so that there is something to interrupt."""

    def __init__(self, engine, seconds):
        self._engine, self.seconds = engine, seconds
        self.context, self.check = engine.context, engine.check
        self.open = 0  # streams that were begun and not closed

    def stream(self, request):
        inner = self._engine.stream(request)
        return self._slowly(inner)

    def _slowly(self, bursts):
        self.open += 1
        try:
            for burst in bursts:
                yield burst
                time.sleep(self.seconds)
        finally:
            bursts.close()
            self.open -= 1


class Running:
    """A server on a free port of this machine."""

    def __init__(self, service, port):
        self.service, self.port = service, port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def client(self, key="none"):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=30)

    def post(self, path="completions", **body):
        prompt = {"prompt": "def f("} if path == "completions" else {}
        body = {**prompt, "max_tokens": 4, "temperature": 0, **body}
        given = {k: v for k, v in body.items() if v is not ...}
        text = json.dumps(given)  # escapes lone surrogates, which httpx's own encoding refuses
        headers = {"Content-Type": "application/json"}
        return self.http.post(f"/v1/{path}", content=text, headers=headers)

    def metric(self, name, **labels):
        total = 0.0
        for family in self.service.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == f"laneformer_{name}" and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def wait(self, condition, seconds=10.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "nothing happened"
            time.sleep(0.005)

    def idle(self):
        return not (self.metric("active_requests") or self.metric("queue_length"))


@contextmanager
def serving(loaded, engine, connections=None, **options):
    service = Service(loaded, engine, "tiny", **{"limits": Limits(), **options})
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        service.app(),
        http=Connection,
        ws="none",
        log_config=None,
        limit_concurrency=connections,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    running = Running(service, listener.getsockname()[1])
    try:
        running.wait(lambda: server.started)
        yield running
    finally:
        running.http.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        assert service.worker.join(10)
