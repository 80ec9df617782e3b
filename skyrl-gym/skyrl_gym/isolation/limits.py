"""What a process may use up."""

from __future__ import annotations

import resource
from contextlib import suppress

MOST_FILES = 64  # open ones
MOST_STACK = 64 << 20  # bytes; deep recursion is a common way to solve a task


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
