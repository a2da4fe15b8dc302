"""`laneformer serve` as a process: it starts, answers, and ends when told to."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from laneformer_jax.cli import main


def test_sigterm_while_streaming_says_so_and_ends(checkpoint, tmp_path):
    command = [sys.executable, "-m", "laneformer_jax", "serve", str(checkpoint)]
    command += ["--port", "0", "--grace", "0.3", "--name", "small"]
    log = tmp_path / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={
                **os.environ,
                "XDG_CACHE_HOME": str(tmp_path),
                "JAX_PLATFORMS": "cpu",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            },
        )
    try:
        end = time.monotonic() + 120
        while not (
            ready := re.search(r"serving small at (http://127\.0\.0\.1:\d+)", log.read_text())
        ):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        with httpx.Client(base_url=ready[1], timeout=60) as client:
            body = {
                "prompt": ["def f("] * 64,
                "max_tokens": 56,
                "stream": True,
                "ignore_eos": True,
            }
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(line for line in lines if line.startswith("data: {"))
                process.send_signal(signal.SIGTERM)
                sent = time.monotonic()
                events = [line[6:] for line in lines if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["code"] == "shutting_down"
            assert process.wait(10) == 0
            assert time.monotonic() - sent < 8
            with pytest.raises(httpx.ConnectError):
                client.get("/health")
    finally:
        process.kill()
    assert "Traceback" not in log.read_text()


def test_what_cannot_be_is_told_before_the_model_loads(capsys, tmp_path):
    def error(*args):
        assert main(["serve", str(tmp_path / "missing"), *args]) == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}" in error("--port", str(port))
    assert "cannot listen on no.such.host.invalid" in error("--host", "no.such.host.invalid")
    assert "--port: 99999 must be from 0 to 65535" in error("--port", "99999")
    assert "--max-queue: 0 must be at least 1" in error("--max-queue", "0")
    assert "--grace: -1.0" in error("--grace", "-1")
    # The last is what Python makes of a byte that is not UTF-8.
    for name in ("", " ", "a\nb", "\udcff"):
        assert "--name: " in error("--name", name)
    assert "holds no key" in error("--api-key-file", os.devnull)
    assert "missing" in error("--port", "0")  # and of what was fine, the checkpoint is the first
