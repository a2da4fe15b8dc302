"""One sandboxed interpreter seen from outside: start it, talk to it, end it."""

from __future__ import annotations

import marshal
import os
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.sandbox.inside.channel import READY

FOLDER = Path(__file__).parent
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from inside.launch import main; main()"
# Hash order is the same in every run, numpy stays on one thread.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
    "PATH": "/nonexistent",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_READ_SIZE = 1 << 20
_F_SETPIPE_SZ = 1031
_HEAD = 16 + 1 + 8


class SandboxError(Exception):
    """The process broke the protocol, died, or ran out of time; the message says which."""


class TimeLimitError(SandboxError):
    """The deadline passed."""


@dataclass(frozen=True)
class Frame:
    """One frame from inside: a tag of `inside.channel` and its payload."""

    tag: bytes
    payload: bytes


@dataclass(frozen=True)
class Usage:
    """Wall seconds from start to end, and the exit status (negative: a signal)."""

    seconds: float
    exit_status: int


class Process:
    """A fresh interpreter running `inside.launch`.

    Args:
        command: what to run before `-s -P -S -B -c …`, ending in the interpreter.
        options: orders for `inside.confine` and the role; marshalled.
        frame_limit: most bytes accepted in one payload.
    """

    def __init__(self, command: Sequence[str], options: Mapping[str, Any], frame_limit: int):
        self._secret = secrets.token_bytes(16)
        self._frame_limit = frame_limit
        self._began = time.monotonic()
        self._buffer = bytearray()
        self._usage: Usage | None = None
        self._ending_lock = threading.Lock()
        self._child = subprocess.Popen(
            [*command, "-s", "-P", "-S", "-B", "-c", _BOOT, str(FOLDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._in, self._out = self._child.stdin.fileno(), self._child.stdout.fileno()
        for descriptor in (self._in, self._out):
            os.set_blocking(descriptor, False)
            _enlarge(descriptor)
        self._options = {**options, "secret": self._secret}
        self.layers: list[str] = []

    def start(self, deadline: float) -> None:
        """Send the orders and wait until the process has given up its rights.

        Args:
            deadline: `time.monotonic()` at which to stop waiting.
        """
        self.send(self._options, deadline)
        frame = self.receive(deadline)
        if frame.tag != READY:
            raise SandboxError("the launcher sent no report")
        self.layers = frame.payload.decode().split()

    def send(self, message: Any, deadline: float) -> None:
        """Send one message; bytes are taken as marshalled already."""
        data = message if isinstance(message, bytes) else marshal.dumps(message, 4)
        view = memoryview(len(data).to_bytes(8, "little") + data)
        while view:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise SandboxError(self._ending()) from None

    def receive(self, deadline: float) -> Frame:
        """The next frame.

        Raises:
            TimeLimitError: the deadline passed.
            SandboxError: the process ended, or what it sent is not a frame.
        """
        # Nothing is taken before the frame is whole, so a caller may wait again after a time-out.
        self._fill(_HEAD, deadline)
        if self._buffer[:16] != self._secret:
            raise SandboxError("wrote to the private pipe")
        tag, length = bytes(self._buffer[16:17]), int.from_bytes(self._buffer[17:_HEAD], "little")
        if length > self._frame_limit:
            raise SandboxError(f"a result of {length >> 20} MiB; {self._frame_limit >> 20} allowed")
        self._fill(_HEAD + length, deadline)
        payload = bytes(memoryview(self._buffer)[_HEAD : _HEAD + length])
        del self._buffer[: _HEAD + length]
        return Frame(tag, payload)

    def kill(self) -> None:
        """Kill the process, if it still runs; from any thread. Whoever waits for it is told."""
        with self._ending_lock:
            if self._usage is None:
                os.kill(self._child.pid, signal.SIGKILL)  # ours until it is reaped

    def close(self) -> Usage:
        """Kill the process, if it still runs, and say what it used."""
        if self._usage is None:
            self.kill()
            with self._ending_lock:
                self._usage = Usage(time.monotonic() - self._began, self._child.wait())
            for stream in (self._child.stdin, self._child.stdout):
                assert stream
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        assert self._usage
        return self._usage

    def _ending(self) -> str:
        """Why the pipe is closed: exit status or signal, in words."""
        # Threads may outlive the pipe, so that the process is not sure to end by itself.
        for _ in range(50):
            if os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.002)
        code = self.close().exit_status
        # bubblewrap reports the death of its child by a signal as 128 + signal.
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if number == signal.SIGKILL:
            return "killed"
        if number:
            try:
                return f"crashed ({signal.Signals(number).name})"
            except ValueError:
                pass
        return f"exited with status {code} before its results were complete"

    def _fill(self, length: int, deadline: float) -> None:
        while len(self._buffer) < length:
            self._wait(self._out, select.POLLIN, deadline)
            try:
                data = os.read(self._out, max(_READ_SIZE, length - len(self._buffer)))
            except BlockingIOError:
                continue
            if not data:
                raise SandboxError(self._ending())
            self._buffer += data

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        poll = select.poll()
        poll.register(descriptor, event)
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeLimitError("out of time")


def _enlarge(descriptor: int) -> None:
    import fcntl

    try:
        fcntl.fcntl(descriptor, _F_SETPIPE_SZ, _READ_SIZE)
    except OSError:
        pass  # over the user's pipe quota; only slower


def user_threads() -> int:
    """Threads of this user now; RLIMIT_NPROC counts them all."""
    mine, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == mine:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count
