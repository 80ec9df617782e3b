"""A worker: `python -m skyrl_gym.maths FD`.

It reads lines of JSON, ``[answer, gold, seconds]``, and answers ``{"is_correct": …, "is_spent": …}``. Its time and its
memory are limited.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import time
from contextlib import suppress

from skyrl_gym.worker import end_with_parent

MEMORY_BYTES = 512 << 20  # of addresses; Python and sympy take about 130 MiB
SPENT_BYTES = 256 << 20  # a worker that keeps more than this between two answers is replaced,
SPENT_ANSWERS = 2000  # and so is one that has given this many


def serve(fd: int) -> None:
    """Be a worker: compare answers until nobody asks any more."""
    logging.disable()  # math-verify warns that its alarms are off
    with socket.socket(fileno=fd) as line, line.makefile("rw", encoding="utf-8", newline="\n") as stream:
        is_same("1", "1")  # imports, and tables that are built once, are not on the first answer's time
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # the parser complains of every answer that is none
        limit("RLIMIT_AS", MEMORY_BYTES)
        limit("RLIMIT_CORE", 0)
        stream.write("{}\n")
        stream.flush()
        for n_answers, question in enumerate(stream, start=1):
            answer, gold, seconds = json.loads(question)
            # The kernel sees to this one, also where a long operation keeps all threads of Python waiting.
            limit("RLIMIT_CPU", math.ceil(time.process_time() + seconds) + 1)
            is_correct = is_same(answer, gold)
            is_spent = n_answers >= SPENT_ANSWERS or address_space() > SPENT_BYTES
            stream.write(json.dumps({"is_correct": is_correct, "is_spent": is_spent}) + "\n")
            stream.flush()


def is_same(answer: str, gold: str) -> bool | None:
    """What math-verify says, with its own alarms off; None where it finds nothing in `gold`."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as compare

    box = [LatexExtractionConfig(boxed_match_priority=0)]
    right, given = (parse(_latex(text), box, parsing_timeout=None) for text in (gold, answer))
    return bool(compare(right, given, timeout_seconds=None)) if right else None


def _latex(text: str) -> str:
    r"""As math-verify wants it: in a box; a percentage, which it does not read in a box, as ``$50$\%``."""
    if not text.rstrip(" $").endswith("%"):
        return rf"\boxed{{{text}}}"
    number = text.strip(" $").removesuffix("%").removesuffix("\\")
    return rf"${number}$\%"


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


if __name__ == "__main__":
    end_with_parent()
    serve(int(sys.argv[1]))
