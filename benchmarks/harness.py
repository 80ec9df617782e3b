"""Paired measurements: contenders in separate processes take turns, and a page reports medians, spread and ratios.

The order is A B A B …, never A A … B B …. If another job slows the machine down for ten seconds, it slows both
contenders, and the ratio of each pair barely changes. The first repetitions of each contender are not counted, since
they compile, allocate and fill caches.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

READY, RESULT = "ready", "result "


@dataclass(frozen=True)
class Sample:
    """One repetition of one contender."""

    seconds: float
    cpu_seconds: float
    parts: Mapping[str, float]
    """Seconds per stage of the repetition."""
    facts: Mapping[str, float]
    """Values that show that the contenders do the same work, such as the mean entropy."""
    peak_bytes: int
    """Peak resident memory of the process so far."""


@dataclass
class Contender:
    """A child process that runs one repetition per request (see `Requests`)."""

    name: str
    process: subprocess.Popen[str]
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    @contextmanager
    def running(cls, name: str, command: Sequence[str | Path], variables: Mapping[str, str]) -> Iterator[Contender]:
        """Start the process, wait until it is ready, and stop it at the end. Its output goes to stderr."""
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        with process:
            try:
                contender = cls(name, process)
                contender._read(READY)
                yield contender
                process.communicate(timeout=60)  # it exits when its standard input ends
            finally:
                process.kill()

    def measure(self) -> Sample:
        """Run one repetition."""
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return Sample(**json.loads(self._read(RESULT)))

    def _read(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
            print(line, end="", file=sys.stderr)
        raise RuntimeError(f"{self.name} ended with exit status {self.process.wait()}")

    def median(self, part: str | None = None) -> float:
        """Return the median seconds of a repetition, or of one part of it."""
        return statistics.median(s.seconds if part is None else s.parts[part] for s in self.samples)

    def spread(self) -> str:
        """Format the median, minimum and maximum seconds."""
        seconds = [sample.seconds for sample in self.samples]
        return f"{self.median():.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def alternate(contenders: Sequence[Contender], n_times: int, n_warmups: int = 2) -> None:
    """Run the contenders in turn, `n_times` each after `n_warmups`."""
    for repetition in range(n_warmups + n_times):
        for contender in contenders:
            sample = contender.measure()
            if repetition >= n_warmups:
                contender.samples.append(sample)
            parts = "".join(f", {name} {seconds:.2f}" for name, seconds in sample.parts.items() if seconds >= 0.01)
            print(f"{contender.name}: {sample.seconds:.2f} s{parts}", flush=True)


class Requests:
    """The child's side of a `Contender`."""

    def wait(self) -> bool:
        """Report that the process is ready and wait for a request. Return False if there will be none."""
        print(READY, flush=True)
        is_requested = bool(sys.stdin.readline())
        self._started = time.perf_counter(), time.process_time()
        return is_requested

    def report(self, parts: Mapping[str, float], facts: Mapping[str, float]) -> None:
        """Report the repetition started by the last request."""
        seconds, cpu_seconds = (
            now - start for now, start in zip((time.perf_counter(), time.process_time()), self._started, strict=True)
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(RESULT + json.dumps(asdict(Sample(seconds, cpu_seconds, parts, facts, peak))), flush=True)


def matmul_rate() -> float:
    """Measure the floating-point operations per second of a large float32 matrix product with all threads."""
    a, b = torch.randn(4096, 1024), torch.randn(1024, 1024)
    return 2 * 4096 * 1024 * 1024 / _fastest(lambda: torch.mm(a, b))


def copy_rate() -> float:
    """Measure the bytes per second that a large copy reads and writes with all threads."""
    source = torch.randn(1 << 26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source))


def _fastest(function: Any) -> float:
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def conditions() -> str:
    """Describe the conditions, e.g. "2026-01-31, commit 1a2b3c4, AMD EPYC, 2 cores, 2 threads, torch 2.13.0"."""
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=True).stdout.strip()
    changed = [
        "git",
        "diff",
        "--quiet",
        "HEAD",
        "--",
        ":/",
        ":!/benchmarks/*.md",
        ":!/benchmarks/*.json",
    ]  # results excluded
    if subprocess.run(changed, check=False).returncode:
        commit += "-dirty"
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    cpu = names[0] if names else platform.processor()
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    packages = f"torch {version('torch')}, transformers {version('transformers')}"
    return f"{time.strftime('%Y-%m-%d')}, commit {commit}, {cpu}, {threads}, {packages}"
