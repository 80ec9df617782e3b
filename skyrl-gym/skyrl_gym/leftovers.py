"""What an environment may leave running in this process, or open."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")  # on Linux; elsewhere only threads are counted
PATIENCE_SECONDS = 2.0


def n_held() -> dict[str, int]:
    """How many threads, child processes and open files there are."""
    held = {"threads": threading.active_count(), "processes": len(child_processes())}
    with suppress(FileNotFoundError):
        held["open files"] = len(os.listdir(PROCESS / "fd"))
    return held


def child_processes() -> set[int]:
    """The processes that this one has started, in whichever thread, and that are not gone."""
    children: set[int] = set()
    for thread in PROCESS.glob("task/*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            children.update(map(int, thread.read_text().split()))
    return children


def end_soon(status: int, processes: Iterable[int]) -> None:
    """End this process although a call hangs in it, and kill `processes` at once, which the call may have started.

    There is time for a regular end, but no more than that: `sys.exit` would wait for threads of a pool forever.
    """
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def end() -> None:
        time.sleep(PATIENCE_SECONDS)
        os._exit(status)

    threading.Thread(target=end, name="end-soon", daemon=True).start()
