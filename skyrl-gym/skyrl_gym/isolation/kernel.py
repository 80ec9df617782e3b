"""Kernel interfaces that Python lacks, and resource limits."""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from functools import cache

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_MM, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 35, 36, 38
PR_SET_SECCOMP = 22


@cache
def libc() -> ctypes.CDLL:
    """Return the C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set a property of this process, on Linux only."""
    if sys.platform == "linux":
        libc().prctl(option, value, 0, 0, 0)


def set_limit(name: int, value: int, *, is_final: bool) -> None:
    """Limit a resource of this process and its children, e.g. `resource.RLIMIT_CPU`, if the platform supports it.

    A final limit cannot be raised again.
    """
    _, hard = resource.getrlimit(name)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with suppress(ValueError, OSError):  # macOS does not limit memory
        resource.setrlimit(name, (value, value if is_final else hard))


def check_result(name: str, result: int) -> int:
    """Return the result of a call. Raise OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
