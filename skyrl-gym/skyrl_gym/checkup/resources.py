"""Threads, child processes and files that an environment may leak in this process."""

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")  # on Linux. Elsewhere, only threads are counted.
EXIT_SECONDS = 2.0


def count_resources() -> dict[str, int]:
    """Return the number of threads, child processes and open files of this process."""
    counts = {"threads": threading.active_count(), "processes": len(child_processes())}
    with suppress(FileNotFoundError):
        counts["open files"] = len(os.listdir(PROCESS / "fd"))
    return counts


def child_processes() -> set[int]:
    """Return the ids of running processes started by any thread of this process."""
    children: set[int] = set()
    for thread in PROCESS.glob("task/*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            children.update(map(int, thread.read_text().split()))
    return children


def exit_soon(status: int, processes: Iterable[int]) -> None:
    """Exit this process even if a call hangs in it. Kill `processes`, started by the call, immediately.

    A regular exit has `EXIT_SECONDS` to finish. `sys.exit` alone would wait forever for the threads of a pool.
    """
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def end() -> None:
        time.sleep(EXIT_SECONDS)
        os._exit(status)

    threading.Thread(target=end, name="exit-soon", daemon=True).start()
