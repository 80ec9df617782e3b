"""Paired measurements: contenders in separate processes take turns, and the report gives medians, spread and ratios."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

READY, RESULT = "ready", "result "


@dataclass(frozen=True)
class Sample:
    """One repetition of one contender."""

    seconds: float
    cpu_seconds: float
    parts: Mapping[str, float]
    """Seconds of the stages of the repetition."""
    facts: Mapping[str, float]
    """Values that show whether the contenders did the same work, such as the mean entropy."""
    peak_bytes: int
    """Peak resident memory of the process so far."""


@dataclass
class Contender:
    """A child process that runs one repetition per request (see `serve`)."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, command: Sequence[str | Path], **variables: str) -> Contender:
        """Start the process and wait until it is ready; its logs go to this process's stderr."""
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        contender = cls(name, process)
        contender._wait_for(READY)
        return contender

    def measure(self) -> Sample:
        """Run one repetition."""
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return Sample(**json.loads(self._wait_for(RESULT)))

    def close(self) -> None:
        """End the process, which exits when its standard input ends."""
        self.process.communicate(timeout=60)

    def _wait_for(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
            print(line, end="", file=sys.stderr)
        raise RuntimeError(f"{self.name} ended with exit status {self.process.wait()}")


class Requests:
    """The child's side of a `Contender`."""

    def wait(self) -> bool:
        """Report that the process is ready and wait for a request; False if there will be none."""
        print(READY, flush=True)
        is_requested = bool(sys.stdin.readline())
        self._started = time.perf_counter(), time.process_time()
        return is_requested

    def report(self, parts: Mapping[str, float] = {}, facts: Mapping[str, float] = {}) -> None:
        """Report the repetition that began with the last request."""
        seconds, cpu_seconds = (
            now - started
            for now, started in zip((time.perf_counter(), time.process_time()), self._started, strict=True)
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(RESULT + json.dumps(asdict(Sample(seconds, cpu_seconds, parts, facts, peak))), flush=True)
