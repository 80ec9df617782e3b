"""Time and peak memory of the stages of a run."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skyrl_train.lazy import torch

logger = logging.getLogger(__name__)

GIGABYTE = 1e9
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The peak memory of this process in each open stage: of its GPU, or without a GPU its resident memory.

    The system keeps one peak, so each start and end of a stage reads it, raises the peaks of all open stages to it, and
    resets it. A stage therefore includes the stages inside it and those that overlap it.
    """

    def __init__(self) -> None:
        self.highest = 0.0
        """Peak in bytes since the first stage."""
        self._open: dict[int, float] = {}  # peak in bytes of each open stage
        self._n_started = 0

    @contextmanager
    def __call__(self, peaks: dict[str, float], name: str) -> Iterator[None]:
        """Raise `peaks[name]`, in bytes, to the peak of the code inside. Without a measurement, leave it out."""
        self._update()
        self._n_started += 1
        stage = self._n_started
        self._open[stage] = 0.0
        try:
            yield
        finally:
            self._update()
            if peak := self._open.pop(stage):
                peaks[name] = max(peaks.get(name, 0.0), peak)

    def measure(self) -> float:
        """Return the peak in bytes since the process started. Any thread may call it."""
        return max(self.highest, _read_peak())

    def _update(self) -> None:
        peak = _take_peak()
        self.highest = max(self.highest, peak)
        for stage, earlier in self._open.items():
            self._open[stage] = max(earlier, peak)


peak_memory = PeakMemory()
"""The peak memory of this process."""


def _read_peak() -> float:
    """Return the peak memory in bytes since it was last reset. Return 0 where the system does not report it."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_reserved())
    with suppress(OSError):
        if found := re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE):
            return 1024.0 * int(found[1])
    return 0.0


def _take_peak() -> float:
    """Return the peak memory in bytes since the last call, and reset it. Return 0 where it cannot be reset.

    Linux resets the peak of a process's resident memory when it writes 5 to `clear_refs`. Where it cannot be reset, as
    on macOS or in some sandboxes, a stage would get the peak of an earlier one.
    """
    peak = _read_peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return peak
    with suppress(OSError):
        CLEAR_REFS.write_text("5")
        return peak
    return 0.0


class StepTimer:
    """Seconds and peak memory per stage of a step: `with timer("generate"): …`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with peak_memory(self._peaks, name):
                yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            logger.debug("%s took %.3f s", name, seconds)

    def metrics(self) -> dict[str, float]:
        """Return `timing/<stage>` in seconds, and `memory/<stage>`, its peak in GB."""
        peaks = {f"memory/{name}": peak / GIGABYTE for name, peak in self._peaks.items()}
        return {f"timing/{name}": seconds for name, seconds in self._seconds.items()} | peaks
