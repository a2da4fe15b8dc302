"""Find out what isolation this machine really gives, by trying to break it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from eval.sandbox import seccomp
from eval.sandbox.inside.channel import VALUE
from eval.sandbox.inside.decode import decode
from eval.sandbox.process import FOLDER, SandboxError
from eval.sandbox.sandbox import MEMORY, Sandbox, find_bubblewrap, prepare
from laneformer_jax.errors import UserError

_SECONDS = 60.0


def open_sandbox(unsafe: bool = False, bubblewrap: bool = True, memory: int = MEMORY) -> Sandbox:
    """The strongest isolation that works here, tested.

    Args:
        unsafe: go on below Landlock + seccomp.
        bubblewrap: use `bwrap` where it is installed and works.
        memory: address space of a program in bytes.

    Raises:
        UserError: less than Landlock and seccomp hold and `unsafe` is false.
    """
    prepare()
    path = find_bubblewrap() if bubblewrap else None
    full = Sandbox(path, seccomp=seccomp.supported(), memory=memory)
    tried: list[str] = []
    for sandbox in (full, full.without("bubblewrap")) if path else (full,):
        try:
            holes, layers = probe(sandbox)
        except (SandboxError, OSError) as error:
            tried.append(f"{'with' if sandbox.bubblewrap else 'without'} bubblewrap: {error}")
            continue
        landlock = any(layer.startswith("landlock") for layer in layers)
        if holes or not (landlock and "seccomp" in layers):
            tried.append(f"a program could {', '.join(holes)}" if holes else "a layer is missing")
            continue
        names = ["landlock", "seccomp"]
        if sandbox.bubblewrap and _namespaces_hold(sandbox):
            names.insert(0, "namespaces")
        return replace(sandbox, level="+".join(names))
    if not unsafe:
        raise UserError(
            "this machine does not isolate untrusted programs well enough: Landlock and seccomp are"
            f" both needed (Linux 5.13 or newer); {'; '.join(tried)}. Run in a throwaway machine,"
            " or pass --unsafe-no-sandbox to run the programs with your own rights"
        )
    return replace(_runnable(full), level="unsafe")


def _runnable(full: Sandbox) -> Sandbox:
    """The first of fewer and fewer layers under which a program runs at all."""
    for left_out in ((), ("seccomp",), ("landlock",), ("landlock", "seccomp")):
        sandbox = full.without("bubblewrap", *left_out)
        with contextlib.suppress(SandboxError, OSError):
            probe(sandbox)
            return sandbox
    raise UserError("no Python interpreter could be started for the programs")


def probe(sandbox: Sandbox) -> tuple[list[str], list[str]]:
    """Attempts of `inside.attempts` that succeed, and the layers the launcher reports."""
    source = (FOLDER / "inside" / "attempts.py").read_text(encoding="utf-8")
    with _targets() as arguments:
        process = sandbox.program(source)
        try:
            deadline = time.monotonic() + _SECONDS
            loaded = process.receive(deadline)
            if loaded.tag != VALUE:
                raise SandboxError(loaded.payload.decode("utf-8", "replace"))
            process.send(("call", "succeed", arguments), deadline)
            frame = process.receive(deadline)
            if frame.tag != VALUE:
                raise SandboxError(frame.payload.decode("utf-8", "replace"))
            return [str(hole) for hole in decode(frame.payload)], process.layers
        finally:
            process.close()


def _namespaces_hold(sandbox: Sandbox) -> bool:
    """Whether namespaces alone stop what they are for; what they are not for is left out."""
    holes, _ = probe(sandbox.without("landlock", "seccomp"))
    return not set(holes) - {"fork", "run a program"}


@contextlib.contextmanager
def _targets() -> Iterator[list[object]]:
    """Arguments of `attempts.succeed`: things that exist and would give in without isolation."""
    name = f"laneformer-{secrets.token_hex(8)}"
    with (
        tempfile.TemporaryDirectory(prefix="laneformer-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        os.chmod(folder, 0o777)
        canary = Path(folder) / "canary"
        canary.write_text("canary")
        canary.chmod(0o666)
        port = tcp.getsockname()[1]
        with contextlib.suppress(OSError):
            udp.bind(("127.0.0.1", port))
        unix.bind("\0" + name)
        unix.listen()
        yield [str(canary), os.getpid(), port, name]
