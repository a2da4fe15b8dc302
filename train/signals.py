"""Signals that ask a run to stop: save first, unless asked twice."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CATCH = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


class StopRequest:
    """Set by the first signal.

    Attributes:
        signum: which; None as long as nobody asked.
    """

    def __init__(self) -> None:
        self.signum: int | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it: 143 for SIGTERM, 130 for SIGINT."""
        assert self.signum is not None
        return 128 + self.signum


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT and SIGUSR1 into a StopRequest; a second one ends the process at once.

    A thread watches, since Python's own handlers wait while the main thread compiles or computes.
    Outside the main thread, where Python allows no handlers, nothing is caught.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    read, write = socket.socketpair()
    write.setblocking(False)

    def watch() -> None:
        while received := read.recv(1):
            signum = received[0]
            if signum == 0:
                return
            name = signal.Signals(signum).name
            if request.signum is not None:
                os.write(2, f"{name} again: exiting without saving\n".encode())
                os._exit(128 + signum)
            request.signum = signum
            print(f"{name}: saving, then exiting; again to exit at once", file=sys.stderr)

    handlers = {s: signal.signal(s, lambda *_: None) for s in _CATCH}
    wakeup = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True, name="signals")
    thread.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(wakeup)
        for s, handler in handlers.items():
            signal.signal(s, handler)
        write.send(b"\0")
        thread.join()
        read.close()
        write.close()
