"""The worker's side: a loop that answers one question after another, within limits on time and memory.

It reads lines of JSON, a list each, and answers each with an object that says by `is_spent` whether to replace it.
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

from skyrl_gym.worker import end_with_parent

SPENT_ANSWERS = 2000  # a worker that has given this many is replaced


def serve(fd: int, answer: Callable[[list[Any]], dict[str, Any]], *, memory_bytes: int, spent_bytes: int) -> None:
    """Answer until nobody asks any more. The last item of a question says how many seconds it may take.

    `memory_bytes`: of addresses, the most it gets. `spent_bytes`: one that keeps more between two questions is
    replaced.
    """
    end_with_parent()
    with socket.socket(fileno=fd) as line, line.makefile("rw", encoding="utf-8", newline="\n") as stream:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # libraries complain of every answer that is none
        limit("RLIMIT_AS", memory_bytes)
        limit("RLIMIT_CORE", 0)
        stream.write("{}\n")
        stream.flush()
        for n_answers, text in enumerate(stream, start=1):
            question = json.loads(text)
            # The kernel sees to this one, also where a long operation keeps all threads of Python waiting.
            limit("RLIMIT_CPU", math.ceil(time.process_time() + question[-1]) + 1)
            given = answer(question)
            is_spent = n_answers >= SPENT_ANSWERS or address_space() > spent_bytes
            stream.write(json.dumps(given | {"is_spent": is_spent}) + "\n")
            stream.flush()


def limit(name: str, value: int) -> None:
    """Limit this process, where the platform can."""
    import resource

    with suppress(AttributeError, OSError, ValueError):
        hard = resource.getrlimit(getattr(resource, name))[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (soft, hard))


def address_space() -> int:
    """Bytes of addresses of this process; 0 where the platform does not say. (`ru_maxrss` counts the parent's too.)"""
    try:
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
