"""Running processes and their resource usage, read from /proc. Empty on systems without /proc."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress

STATE, GROUP, SESSION, TIMES = 0, 2, 3, slice(11, 15)  # fields of /proc/…/stat after the name


def memory_bytes(pid: int) -> int:
    """Return a process's resident memory, or 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # the process has ended, or this is not Linux
        return 0


def n_threads(pid: int) -> int:
    """Return a process's number of threads, or 0 once it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of the children it has waited for."""
    ticks = sum(map(int, _stat(pid)[TIMES]))
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def members(field: int, group: int) -> list[int]:
    """Return the processes of a process group (`GROUP`) or of a session (`SESSION`)."""
    number = str(group)
    return [pid for pid in all_processes() if (fields := _stat(pid)) and fields[field] == number]


def is_running(pid: int) -> bool:
    """Return False if a process has ended, even if its parent has not waited for it."""
    return bool(fields := _stat(pid)) and fields[STATE] not in ("Z", "X")


def all_processes() -> Iterator[int]:
    """Yield every process that /proc shows."""
    with suppress(OSError):
        yield from map(int, filter(str.isdigit, os.listdir("/proc")))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/…/stat after the name. Empty once the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
