"""Compute with as many threads as there are free cores.

An operation of a small model takes microseconds and ends with its slowest thread. With more threads than free cores,
one thread waits for a time slice, so a step takes ten times as long.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

INTERVAL_S = 0.2
"""Minimum seconds between two measurements of the load. The kernel's counters advance in steps of 0.01 s."""

_local = threading.local()


class ThreadBudget:
    """The number of threads that operations of the calling thread use: the free cores, up to `n_max`."""

    def __init__(self, n_max: int, stat: Path = Path("/proc/stat")) -> None:
        """Read the kernel's counters from `stat`. A system without this file always uses `n_max` threads."""
        self._n_max = n_max
        self._stat = stat
        self.restart()

    def restart(self) -> None:
        """Measure the load from now on. After a pause, the load during it says nothing about the load now."""
        self._last = (time.monotonic(), time.process_time(), self._busy_seconds())

    def adjust(self) -> None:
        """Set the number of threads to the number of cores that other processes left free since the last call."""
        now = time.monotonic()
        elapsed = now - self._last[0]
        if elapsed < INTERVAL_S:
            return
        own, busy = time.process_time(), self._busy_seconds()
        if busy is not None and self._last[2] is not None:
            n_taken = ((busy - self._last[2]) - (own - self._last[1])) / elapsed
            n_threads = min(self._n_max, max(1, round(len(_cores()) - n_taken)))
            if n_threads != torch.get_num_threads():
                torch.set_num_threads(n_threads)
        self._last = (now, own, busy)

    def _busy_seconds(self) -> float | None:
        """Return the CPU seconds that all processes have spent on our cores.

        Low-priority processes also count: they get little time, but take it in slices of milliseconds, and every thread
        of an operation waits for such a slice to end.
        """
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        wanted = {f"cpu{core}" for core in _cores()}
        ticks = 0
        for name, *values in map(str.split, lines):
            if name in wanted:
                user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, values)
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def threads_per_process(n_processes: int) -> int:
    """Return the number of threads per process if `n_processes` compute at once on this machine."""
    return max(1, len(_cores()) // n_processes)


def adjust_threads() -> None:
    """Adjust the number of threads to the load if called from a compute thread. Otherwise do nothing."""
    budget: ThreadBudget | None = getattr(_local, "budget", None)
    if budget is not None:
        budget.adjust()


@contextmanager
def _at_most(n_threads: int) -> Iterator[int]:
    """Compute with at most `n_threads` threads within the context. Yield the number before and after it."""
    n_before = torch.get_num_threads()
    torch.set_num_threads(min(n_before, n_threads))
    try:
        yield n_before
    finally:
        torch.set_num_threads(n_before)


def half_of_cores() -> AbstractContextManager[int]:
    """Compute with at most half of the cores while another process works at the same time."""
    return _at_most(max(1, len(_cores()) // 2))


class ComputeThread(ThreadPoolExecutor):
    """An executor with one thread. Before each call, it adapts its compute threads to the load since the last pause."""

    def __init__(self, n_threads: int, name: str = "compute") -> None:
        """Compute with at most `n_threads` threads."""
        super().__init__(1, name, initializer=self._start, initargs=(n_threads,))

    def _start(self, n_threads: int) -> None:
        torch.set_num_threads(n_threads)
        _local.budget = ThreadBudget(n_threads)
        _local.idle_since = time.monotonic()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        def call() -> T:
            if time.monotonic() - _local.idle_since > INTERVAL_S:
                _local.budget.restart()
            adjust_threads()
            try:
                return fn(*args, **kwargs)
            finally:
                _local.idle_since = time.monotonic()

        return super().submit(call)


@contextmanager
def compute_thread() -> Iterator[ThreadPoolExecutor]:
    """Create a thread that computes with all free cores, for training and generation. Other threads get one core each.

    OpenMP gives each thread that computes its own team. If the teams together have more threads than there are cores,
    OpenMP puts them to sleep between operations, and a small model takes twice as long (docs/internals/processes.md).
    """
    with _at_most(1) as n_cores, ComputeThread(n_cores) as executor:
        yield executor
