"""Running processes and their resource usage, read from /proc; empty on systems without it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress

PARENT, TIMES = 1, slice(11, 15)  # fields of /proc/…/stat after the name


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # the process has ended, or this is not Linux
        return 0


def n_threads(pid: int) -> int:
    """Return the number of threads of a process; 0 once it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def descendants(root: int) -> list[int]:
    """Return all processes whose ancestor is `root`."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        next_children = children.get(pending.pop(), [])
        found += next_children
        pending += next_children
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of the children that it has waited for."""
    ticks = sum(map(int, _stat(pid)[TIMES]))
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _parents() -> Iterator[tuple[int, int]]:
    """Yield every process and its parent."""
    with suppress(OSError):
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if fields := _stat(pid):
                yield pid, int(fields[PARENT])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/…/stat after the name; empty once the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
