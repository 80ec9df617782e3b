"""Worker processes that this process has started, and waiting for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

SECONDS = 60.0
"""Time limit for operations that take less than a second on an idle machine."""


def workers(module: str) -> set[int]:
    """Return the children of this process that run `module`, and its zombies that were workers of any module."""
    return {child.pid for child in psutil.Process().children() if _is_worker(child, module)}


def _is_worker(child: psutil.Process, module: str) -> bool:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        if child.status() == psutil.STATUS_ZOMBIE:
            return os.getpgid(child.pid) == child.pid  # workers lead a group of their own
        return module in child.cmdline()
    return False


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_true: Callable[[], object]) -> None:
    """Poll a condition; fail if it does not hold within `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
