"""What a confined program must not be able to do; each attempt returns when it succeeds.

The source of this module is run as a candidate by `eval.sandbox.probe`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time

TYPE_CHECKING = False  # typing and collections take longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def succeed(canary: str, parent: int, port: int, abstract: str) -> list[str]:
    """Names of the attempts that were not stopped.

    Args:
        canary: a readable file outside of everything allowed; its folder is writable to its owner.
        parent: process id of the evaluation.
        port: TCP and UDP port that listens on 127.0.0.1.
        abstract: name of a listening abstract Unix socket, without the leading zero byte.
    """
    attempts: dict[str, Callable[[], Any]] = {
        "read a file": lambda: os.read(os.open(canary, os.O_RDONLY), 1),
        "list a folder": lambda: os.listdir(os.path.dirname(canary)),
        "overwrite a file": lambda: os.open(canary, os.O_WRONLY),
        "create a file": lambda: os.open(canary + ".new", os.O_CREAT | os.O_WRONLY),
        "make a folder": lambda: os.mkdir(canary + ".dir"),
        "change a mode": lambda: os.chmod(canary, 0o600),
        "rename a file": lambda: os.rename(canary, canary + ".moved"),
        "signal the parent": lambda: os.kill(parent, 0),
        "change the parent's limits": lambda: _limits_of(parent),
        "trace the parent": lambda: _ptrace(parent),
        "connect by TCP": lambda: socket.create_connection(("127.0.0.1", port), 1),
        "send by UDP": lambda: _udp(port),
        "connect to a Unix socket": lambda: _unix("\0" + abstract),
        "fork": _fork,
        "run a program": _spawn,
    }
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception:
            continue
        found.append(name)
    return found


def _udp(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect(("127.0.0.1", port))
        out.send(b"x")
        time.sleep(0.05)
        out.send(b"x")  # raises when nobody listened to the first


def _unix(address: str) -> None:
    socket.socket(socket.AF_UNIX).connect(address)


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _spawn() -> None:
    os.posix_spawn("/bin/true", ["true"], {})


def _limits_of(pid: int) -> None:
    import resource

    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def _ptrace(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0x4206, pid, None, None) < 0:  # PTRACE_SEIZE
        raise OSError(ctypes.get_errno(), "ptrace")
    libc.ptrace(17, pid, None, None)  # PTRACE_DETACH
