"""Worker process that compares answers: reads ``[answer, gold, seconds]``, writes ``{"is_correct": …}``."""

import logging
import sys
from typing import Any

from skyrl_gym.isolation.namespaces import RANDOM, SYSTEM
from skyrl_gym.maths.equivalence import is_same
from skyrl_gym.worker_pool.serving import serve

MEMORY_BYTES = 512 << 20  # Python and sympy use about 130 MiB
RECYCLE_BYTES = 256 << 20


def answer(question: list[Any]) -> dict[str, Any]:
    """Compare an answer with the ground truth."""
    candidate, gold, _ = question
    return {"is_correct": is_same(candidate, gold)}


if __name__ == "__main__":
    logging.disable()  # math-verify warns that its timeouts are off
    is_same("1", "1")  # warm-up: imports and tables must not count towards the first answer's time
    readable = (*SYSTEM, *RANDOM, *sys.path)
    serve(int(sys.argv[1]), answer, memory_bytes=MEMORY_BYTES, recycle_bytes=RECYCLE_BYTES, readable=readable)
