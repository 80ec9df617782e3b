"""The worker's side of the pool: a loop that answers questions within time and memory limits.

Each question is a JSON list on a line. Each answer is a JSON object whose `is_spent` asks the pool for a replacement.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from skyrl_gym.isolation.kernel import set_limit
from skyrl_gym.isolation.landlock import landlock_version, restrict_access
from skyrl_gym.isolation.seccomp import forbid_calls
from skyrl_gym.runtime.worker import end_with_parent

MAX_ANSWERS = 2000  # per worker, before it is replaced


def serve(
    fd: int,
    answer: Callable[[list[Any]], dict[str, Any]],
    *,
    memory_bytes: int,
    recycle_bytes: int,
    readable: Iterable[str],
) -> None:
    """Answer questions until the socket is closed. The last item of a question is its time limit in seconds.

    `memory_bytes` limits the address space. A worker that keeps more than `recycle_bytes` after an answer is replaced.
    On Linux, the code that answers cannot use sockets or signal other processes. With Landlock, it can only read the
    files and folders in `readable`.
    """
    end_with_parent()
    with (
        socket.socket(fileno=fd) as connection,
        connection.makefile("rw", encoding="utf-8", newline="\n") as stream,
        open(os.devnull, "w") as null,
        AddressSpace() as address_space,
    ):
        os.dup2(null.fileno(), 2)  # libraries print warnings for every malformed answer
        set_limit(resource.RLIMIT_AS, memory_bytes, is_final=False)
        set_limit(resource.RLIMIT_CORE, 0, is_final=False)
        if landlock_version() > 0:
            restrict_access(readable, [os.devnull])
        forbid_calls(is_alone=False, counts_memory=False)
        stream.write("{}\n")
        stream.flush()
        for n_answers, text in enumerate(stream, start=1):
            question = json.loads(text)
            # The kernel enforces this limit even while a long operation blocks all Python threads.
            cpu_seconds = math.ceil(time.process_time() + question[-1]) + 1
            set_limit(resource.RLIMIT_CPU, cpu_seconds, is_final=False)
            result = answer(question)
            is_spent = n_answers >= MAX_ANSWERS or address_space.n_bytes() > recycle_bytes
            stream.write(json.dumps(result | {"is_spent": is_spent}) + "\n")
            stream.flush()


class AddressSpace:
    """The size of this process's address space, from a file opened before the sandbox closes the file system.

    `ru_maxrss` would be wrong, because it includes the parent's.
    """

    def __init__(self) -> None:
        try:
            self._fd: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def __enter__(self) -> AddressSpace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def n_bytes(self) -> int:
        """Return the size in bytes, or 0 without /proc."""
        return 0 if self._fd is None else int(os.pread(self._fd, 128, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")
