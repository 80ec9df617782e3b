"""Resource limits of a process."""

from __future__ import annotations

import resource
from contextlib import suppress

MAX_OPEN_FILES = 64
MAX_STACK_BYTES = 64 << 20  # large, because many solutions recurse deeply


def set_limits(seconds: float, memory_bytes: int, file_bytes: int, n_threads: int | None = None) -> None:
    """Limit this process, and each process that it starts from now on.

    `n_threads` limits the threads of this user, so it is for a user that runs nothing else.
    """
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_STACK: MAX_STACK_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    if n_threads is not None:
        limits[resource.RLIMIT_NPROC] = n_threads
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with suppress(ValueError, OSError):  # macOS does not limit memory
            resource.setrlimit(name, (value, value))
