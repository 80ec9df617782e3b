"""The worker's side of the pool: a loop that answers questions within limits on time and memory.

Each question is a JSON list on a line; each answer is a JSON object whose `is_spent` asks the pool for a replacement.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from skyrl_gym.runtime.worker import end_with_parent

MAX_ANSWERS = 2000  # of a worker before it is replaced


def serve(fd: int, answer: Callable[[list[Any]], dict[str, Any]], *, memory_bytes: int, recycle_bytes: int) -> None:
    """Answer questions until the socket is closed. The last item of a question is its time limit in seconds.

    `memory_bytes` limits the address space. A worker that keeps more than `recycle_bytes` after an answer is replaced.
    """
    end_with_parent()
    with socket.socket(fileno=fd) as connection, connection.makefile("rw", encoding="utf-8", newline="\n") as stream:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)  # libraries print warnings for every malformed answer
        set_limit("RLIMIT_AS", memory_bytes)
        set_limit("RLIMIT_CORE", 0)
        stream.write("{}\n")
        stream.flush()
        for n_answers, text in enumerate(stream, start=1):
            question = json.loads(text)
            # The kernel enforces this limit even while a long operation blocks all threads of Python.
            set_limit("RLIMIT_CPU", math.ceil(time.process_time() + question[-1]) + 1)
            result = answer(question)
            is_spent = n_answers >= MAX_ANSWERS or address_space() > recycle_bytes
            stream.write(json.dumps(result | {"is_spent": is_spent}) + "\n")
            stream.flush()


def set_limit(name: str, value: int) -> None:
    """Set a resource limit of this process, if the platform supports it."""
    import resource

    with suppress(AttributeError, OSError, ValueError):
        hard = resource.getrlimit(getattr(resource, name))[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (soft, hard))


def address_space() -> int:
    """Return the size of this process's address space, or 0 without /proc. (`ru_maxrss` includes the parent's.)"""
    try:
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
