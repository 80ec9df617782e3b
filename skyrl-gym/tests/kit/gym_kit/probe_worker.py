"""A worker that evaluates expressions: `Pool("gym_kit.probe_worker", size=1).ask(["6 * 7", 5.0], 5.0)`."""

import os
import signal
import socket
import sys
import time
from typing import Any

from skyrl_gym.worker_pool.serving import serve

MEMORY_BYTES = 1 << 30
RECYCLE_BYTES = 200 << 20
NAMES = {"os": os, "signal": signal, "socket": socket, "sys": sys, "time": time}


def answer(question: list[Any]) -> dict[str, Any]:
    """Return the value of an expression, or the name of its error."""
    try:
        return {"value": repr(eval(question[0], NAMES))}
    except (OSError, MemoryError) as error:
        return {"value": type(error).__name__}


if __name__ == "__main__":
    readable = [*sys.path, __file__]
    serve(int(sys.argv[1]), answer, memory_bytes=MEMORY_BYTES, recycle_bytes=RECYCLE_BYTES, readable=readable)
