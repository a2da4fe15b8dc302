"""Choosing and starting isolation: bubblewrap when it works, Landlock and seccomp always."""

from __future__ import annotations

import functools
import os
import py_compile
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

from eval.sandbox import seccomp
from eval.sandbox.inside.serve import KEPT
from eval.sandbox.process import FOLDER, Process, user_threads

MEMORY = 4 << 30
THREADS = 64
CPU_SECONDS = 3600  # a last resort: the wall limits of eval.grading are shorter
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_START_LIMIT = 120.0  # seconds; a loaded machine may need a while to start an interpreter


@dataclass(frozen=True)
class Sandbox:
    """How programs are isolated. Made by `eval.sandbox.probe.open_sandbox`, which tests it.

    Args:
        bubblewrap: path of `bwrap`, or None to do without namespaces.
        landlock, seccomp: whether to apply these layers.
        memory: address space of a program in bytes.
        level: what the probe found to hold, such as `namespaces+landlock+seccomp`.
    """

    bubblewrap: str | None
    landlock: bool = True
    seccomp: bool = True
    memory: int = MEMORY
    level: str = "unknown"

    def program(self, source: str) -> Process:
        """Start an interpreter for `source`; the first frame is the outcome of loading it.

        Args:
            source: the program; executed as a module of its own.
        """
        return self._start("serve", {"program": source}, CPU_SECONDS, KEPT)

    def judge(self) -> Process:
        """Start a judge; see `inside.judge`."""
        return self._start("judge", {}, None, 1 << 20)

    def _start(
        self, role: str, extra: dict[str, str], seconds: int | None, frame_limit: int
    ) -> Process:
        root = os.geteuid() == 0
        options = {
            "role": role,
            "path": library_paths(),
            "memory": self.memory,
            "cpu": seconds,
            # Own user ids (root) and user namespaces count this program only.
            "threads": THREADS if root or self.bubblewrap else user_threads() + THREADS,
            "keep_read": root and not _open_to_all(),
            "landlock": readable_paths() if self.landlock else None,
            "filter": seccomp.program() if self.seccomp else b"",
            "parent": 0 if self.bubblewrap else os.getpid(),
            **extra,
        }
        process = Process([*self._prefix(root), _interpreter()], options, frame_limit)
        try:
            process.start(time.monotonic() + _START_LIMIT)
        except BaseException:
            process.close()
            raise
        return process

    def _prefix(self, root: bool) -> list[str]:
        if self.bubblewrap is None:
            return []
        command = [self.bubblewrap, "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        command += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session"]
        command += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev", "--chdir", "/"]
        if root:  # real root: the launcher changes to a user id of its own
            for capability in ("SETUID", "SETGID", "DAC_READ_SEARCH"):
                command += ["--cap-add", f"CAP_{capability}"]
        else:
            command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        for path in (*readable_paths(), str(FOLDER / "inside")):
            if path in _DEVICES:
                continue
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                command += ["--ro-bind", path, path]
        return command

    def without(self, *layers: str) -> Sandbox:
        """The same with layers left out: `bubblewrap`, `landlock`, `seccomp`."""
        changes: dict[str, bool | None] = {
            name: None if name == "bubblewrap" else False for name in layers
        }
        return replace(self, level="unknown", **changes)  # type: ignore[arg-type]


def find_bubblewrap() -> str | None:
    """Path of `bwrap`, if installed."""
    return shutil.which("bwrap")


def prepare() -> None:
    """Compile the launcher once, so that each program's start does not."""
    for source in (FOLDER / "inside").glob("*.py"):
        try:
            py_compile.compile(str(source), doraise=True)
        except OSError:
            return  # an installation we cannot write to


@functools.cache
def _interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def library_paths() -> list[str]:
    """The site-packages folders a program may import from."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


@functools.cache
def readable_paths() -> list[str]:
    """Everything a program may read: interpreter, standard library, packages, shared libraries."""
    base = sys.base_prefix
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    python = [_interpreter(), f"{base}/lib", *library_paths()]
    share = ["/usr/share/zoneinfo", "/etc/localtime"]
    return list(dict.fromkeys([*system, *python, *share, *_DEVICES]))


@functools.cache
def _open_to_all() -> bool:
    """Whether any user may enter the folders the interpreter and its packages lie in."""
    for path in (_interpreter(), f"{sys.base_prefix}/lib", *library_paths()):
        for folder in (Path(path), *Path(path).parents):
            needed = 0o5 if folder.is_dir() else 0o4
            if folder.stat().st_mode & needed != needed and folder.stat().st_mode & 1 == 0:
                return False
    return True
