"""What processes there are, and what they take; nothing where there is no /proc."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress

PARENT, TIMES = 1, slice(11, 15)  # where they stand in /proc/…/stat, behind the name


def memory_of(pid: int) -> int:
    """Bytes of memory that a process holds."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # it has ended, or this is not Linux
        return 0


def n_threads_of(pid: int) -> int:
    """How many threads a process has; 0 once it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def descendants(root: int) -> list[int]:
    """All processes that come from `root`, by their parents."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = [root]
    while waiting:
        of_one = children.get(waiting.pop(), [])
        found += of_one
        waiting += of_one
    return found


def cpu_seconds_of(pid: int) -> float:
    """Seconds that a process, and those of its children that it has waited for, have computed."""
    ticks = sum(map(int, _stat(pid)[TIMES]))
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _parents() -> Iterator[tuple[int, int]]:
    """Every process and its parent."""
    with suppress(OSError):
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if fields := _stat(pid):
                yield pid, int(fields[PARENT])


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, behind its name; empty once it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
