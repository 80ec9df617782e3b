"""What a program may use up, and, where it is not alone, what it may not ask of the kernel."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

from skyrl_gym.isolation.kernel import PR_SET_NO_NEW_PRIVS, checked, libc, prctl

MOST_FILES = 64  # open ones
MOST_STACK = 64 << 20  # bytes; deep recursion is a common way to solve a task

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's numbers for them
SIGNALS = {"x86_64": (62, 200, 234, 129, 297, 424), "aarch64": (129, 130, 131, 138, 240, 424)}
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal."""
FORBIDDEN = {
    "x86_64": (101, 310, 311, 438, 41, 425, 29, 64, 68, 319, 248, 249, 250, 323, 321, 298),
    "aarch64": (117, 270, 271, 438, 198, 425, 194, 190, 186, 279, 217, 218, 219, 282, 280, 241),
}
"""ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, socket, io_uring_setup; what holds memory that nobody
counts: shmget, semget, msgget, memfd_create; add_key, request_key, keyctl, userfaultfd, bpf, perf_event_open."""
X32 = 0x40000000  # from here on, other numbers for the same calls of x86_64

LOAD, EQUAL, AT_LEAST, ANSWER = 0x20, 0x15, 0x35, 0x06  # what a filter's steps do
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000  # what it answers
ARCHITECTURE_AT, CALL_AT = 4, 0  # where it finds them


def limit(seconds: float, memory_bytes: int, file_bytes: int) -> None:
    """From here on, this process and those it starts get no more than this, each."""
    wanted = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: MOST_FILES,
        resource.RLIMIT_STACK: MOST_STACK,
        resource.RLIMIT_CORE: 0,
    }
    for what, value in wanted.items():
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with suppress(ValueError, OSError):  # macOS has no limit on memory
            resource.setrlimit(what, (value, value))


def forbid_calls(*, with_signals: bool) -> None:
    """From here on, a socket or a look into another process fails with EPERM, and so does a signal `with_signals`.

    Linux, on chips we know.
    """
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        return
    steps = _filter(ARCHITECTURES[machine], FORBIDDEN[machine] + (SIGNALS[machine] if with_signals else ()))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(steps), ctypes.addressof(held))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    checked("seccomp", libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def memory_of(pid: int) -> int:
    """Bytes of memory that a process holds."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # it has ended, or this is not Linux
        return 0


def n_threads_of(pid: int) -> int:
    """How many threads a process has; 0 once it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def descendants(root: int) -> list[int]:
    """All processes that come from `root`, by their parents."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = [root]
    while waiting:
        of_one = children.get(waiting.pop(), [])
        found += of_one
        waiting += of_one
    return found


def _filter(architecture: int, numbers: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Steps (what, how many to skip if so, and if not, a number) that refuse calls with these numbers."""
    n = len(numbers)
    head = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (ANSWER, 0, 0, KILL),
        (LOAD, 0, 0, CALL_AT),
        (AT_LEAST, n + 1, 0, X32),
    ]
    tests = [(EQUAL, n - i, 0, number) for i, number in enumerate(numbers)]
    return [*head, *tests, (ANSWER, 0, 0, ALLOW), (ANSWER, 0, 0, REFUSE)]


def _parents() -> Iterator[tuple[int, int]]:
    """Every process and its parent; none where there is no /proc."""
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                yield int(name), int(file.read().rpartition(")")[2].split()[1])
