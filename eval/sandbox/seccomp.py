"""The system-call filter: an allow list, compiled to classic BPF for seccomp.

Everything that is not on the list fails with EPERM. There is no fork, exec, kill, socket to anything
outside, ptrace, mount, chmod, memfd, io_uring or bpf, so what reaches the kernel is what a Python
program that computes needs: memory, files (which Landlock limits), time, threads and pipes.
"""

from __future__ import annotations

import functools
import platform
import struct

# name: (x86_64, aarch64), from the kernel's asm/unistd_64.h and asm-generic/unistd.h.
_CALLS: dict[str, tuple[int, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "close": (3, 57),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "stat": (4, None),
    "lstat": (6, None),
    "statx": (332, 291),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "open": (2, None),
    "openat": (257, 56),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "sched_yield": (24, 124),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "getcpu": (309, 168),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "set_tid_address": (218, 96),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "arch_prctl": (158, None),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "pause": (34, None),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "getsockopt": (55, 209),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Calls that depend on an argument: name -> (index of the argument, mask, allowed values).
_CLONE_THREAD = 0x00010000
_PR_SET_NAME = 15
_FCNTL = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIO*
_BY_ARGUMENT: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "clone": [(0, _CLONE_THREAD, (_CLONE_THREAD,))],
    # F_SETOWN and F_SETSIG could send signals to other processes, F_SETPIPE_SZ pins memory.
    "fcntl": [(1, 0xFFFFFFFF, _FCNTL)],
    "ioctl": [(1, 0xFFFFFFFF, _IOCTL)],
    "prctl": [(0, 0xFFFFFFFF, (_PR_SET_NAME,))],
    # With the id of another process it would change that process's limits.
    "prlimit64": [(0, 0xFFFFFFFF, (0,))],
    # Connected pairs for asyncio; a datagram socket could send to any address.
    "socketpair": [(0, 0xFFFFFFFF, (1,)), (1, 0xF, (1,))],
}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_GREATER_EQUAL = 0x15, 0x35
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050001, 0x00050026
_X32 = 0x40000000


def supported() -> bool:
    """Whether a filter is known for this machine's architecture."""
    return platform.machine() in _COLUMN


@functools.cache
def program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`, 8 bytes each.

    Args:
        machine: `x86_64` or `aarch64`; this machine's by default.
    """
    machine = machine or platform.machine()
    column = _COLUMN[machine]
    code: list[bytes] = []

    def emit(op: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        code.append(struct.pack("=HBBI", op, if_true, if_false, value))

    emit(_LOAD, 4)  # struct seccomp_data: nr, arch, instruction_pointer, args[6]
    emit(_JUMP_EQUAL, _AUDIT_ARCH[machine], if_true=1)
    emit(_RETURN, _KILL)
    emit(_LOAD, 0)
    if machine == "x86_64":
        emit(_JUMP_GREATER_EQUAL, _X32, if_false=1)
        emit(_RETURN, _KILL)
    for name, numbers in _CALLS.items():
        number = numbers[column]
        if number is None:
            continue
        if name == "clone3":  # its flags lie in memory; libc falls back to clone
            emit(_JUMP_EQUAL, number, if_false=1)
            emit(_RETURN, _ENOSYS)
        elif name in _BY_ARGUMENT:
            tests = _BY_ARGUMENT[name]
            length = sum(3 + len(values) for _, _, values in tests) + 1
            emit(_JUMP_EQUAL, number, if_false=length)
            for index, mask, values in tests:
                emit(_LOAD, 16 + 8 * index)
                emit(_AND, mask)
                for i, value in enumerate(values):
                    emit(_JUMP_EQUAL, value, if_true=len(values) - i)
                emit(_RETURN, _EPERM)
            emit(_RETURN, _ALLOW)
        else:
            emit(_JUMP_EQUAL, number, if_false=1)
            emit(_RETURN, _ALLOW)
    emit(_RETURN, _EPERM)
    return b"".join(code)
