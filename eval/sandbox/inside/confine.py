"""Give up every right that a computing program does not need, before its first line runs."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

TYPE_CHECKING = False  # typing and collections take longer to import than all the rest
if TYPE_CHECKING:
    from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_CAP_DAC_READ_SEARCH, _CAP_SETUID = 2, 7
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534

# The Landlock calls have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
# File-system rights that each Landlock ABI knows: 13 in the first, then refer, truncate, ioctl.
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def confine(options: dict[str, Any]) -> list[str]:
    """Apply the limits in `options` and return the names of the layers that hold.

    Order matters: paths are opened while we may, then privileges go, then Landlock, and the
    system-call filter last because it forbids all of the above.

    Args:
        options: `memory`, `cpu`, `threads`, `keep_read`, `landlock`, `filter`; see
            `eval.sandbox.sandbox.Sandbox`.
    """
    layers = ["rlimits"]
    _limit(options)
    ruleset, abi = _ruleset(options["landlock"])
    if _drop_privileges(options["keep_read"]):
        layers.append("uid")
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != options["parent"] and options["parent"]:
        os._exit(1)  # the parent died before we asked to die with it
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if ruleset >= 0:
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)
        layers.append(f"landlock{abi}")
    if options["filter"]:
        _install_filter(options["filter"])
        layers.append("seccomp")
    return layers


def _limit(options: dict[str, Any]) -> None:
    for what, value in (
        (resource.RLIMIT_AS, options["memory"]),
        (resource.RLIMIT_CPU, options["cpu"]),
        (resource.RLIMIT_NPROC, options["threads"]),
        (resource.RLIMIT_STACK, 64 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(what)
        if value is None:
            continue
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(what, (value, value))


def _ruleset(paths: list[str] | None) -> tuple[int, int]:
    """A Landlock rule set that allows reading beneath `paths`: its descriptor, or -1, and the ABI."""
    abi = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if paths is None or abi <= 0:
        return -1, 0
    files = (1 << _FS_RIGHTS.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0  # bind and connect TCP
    scope = 3 if abi >= 6 else 0  # abstract Unix sockets and signals
    attributes = struct.pack("=QQQ", files, network, scope)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _check(
        _libc.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0),
        "landlock_create_ruleset",
    )
    for path in paths:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        if path == os.devnull:
            rights |= _WRITE_FILE
        rule = struct.pack("=Qi", rights, opened)
        _check(_libc.syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0), "landlock_add_rule")
        os.close(opened)
    return ruleset, abi


def _drop_privileges(keep_read: bool) -> bool:
    """Leave root for a user id of our own, and all capabilities. False when not root.

    The id is ours alone where the user namespace allows it, so that the limit on threads counts
    this program only.
    """
    if os.geteuid() != 0:
        return False
    _prctl(_PR_SET_KEEPCAPS, 1)
    dropped = False
    for identity in (2_000_000_000 + os.getpid() % 1_000_000, _NOBODY):
        try:
            os.setgroups([])
            os.setresgid(identity, identity, identity)
            os.setresuid(identity, identity, identity)
        except OSError:
            continue
        dropped = True
        break
    # Reading is kept where the interpreter lies in a folder only root may enter; Landlock limits it.
    kept = 1 << _CAP_DAC_READ_SEARCH if keep_read else 0
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    sets = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
    _check(_libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(sets)), "capset")
    return dropped


def _install_filter(code: bytes) -> None:
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(kept))
    _check(
        _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0),
        "seccomp",
    )


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl({option})")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result
