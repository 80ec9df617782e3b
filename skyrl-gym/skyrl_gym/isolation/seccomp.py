"""The filter of system calls for a program."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

from skyrl_gym.isolation.kernel import PR_SET_NO_NEW_PRIVS, check_result, libc, prctl

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's numbers for them
SIGNALS = {"x86_64": (62, 200, 234, 129, 297, 424), "aarch64": (129, 130, 131, 138, 240, 424)}
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal."""
FORBIDDEN = {
    "x86_64": (101, 310, 311, 438, 41, 425, 29, 64, 68, 319, 248, 249, 250, 323, 321, 298),
    "aarch64": (117, 270, 271, 438, 198, 425, 194, 190, 186, 279, 217, 218, 219, 282, 280, 241),
}
"""ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, socket, io_uring_setup; calls that hold memory outside of
any accounting: shmget, semget, msgget, memfd_create; add_key, request_key, keyctl, userfaultfd, bpf, perf_event_open.
"""
X32 = 0x40000000  # from here on, other numbers for the same calls of x86_64

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # operations of the filter
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000  # its return values
ARCHITECTURE_OFFSET, CALL_OFFSET = 4, 0  # in the data of a call


def forbid_calls(*, with_signals: bool) -> None:
    """Make sockets and access to other processes fail with EPERM from now on; with `with_signals`, also signals.

    Does nothing except on Linux on the `ARCHITECTURES`.
    """
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        return
    steps = _filter(ARCHITECTURES[machine], FORBIDDEN[machine] + (SIGNALS[machine] if with_signals else ()))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(steps), ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    check_result("seccomp", libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def _filter(architecture: int, numbers: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return steps (operation, skip if true, skip if false, operand) that refuse calls with these numbers."""
    n = len(numbers)
    head = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, CALL_OFFSET),
        (AT_LEAST, n + 1, 0, X32),
    ]
    tests = [(EQUAL, n - i, 0, number) for i, number in enumerate(numbers)]
    return [*head, *tests, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
