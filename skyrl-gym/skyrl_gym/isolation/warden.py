"""The process around a program that nobody has read. `program.py` starts it; nobody imports it.

It reads a job from its standard input and writes a line of JSON for each run.

At the level `namespaces` the program finds itself alone: in a process namespace of its own, whose end kills all that
is in it; without a network; and of the file system with only Python and the system's libraries, read-only, and an empty
folder in memory. At the level `limits` there are still limits, a sweep for whatever it started, and on Linux a filter
of system calls: no signal to anybody, no socket, no look into another process.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from skyrl_gym.isolation.child import become_the_program
from skyrl_gym.isolation.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl
from skyrl_gym.isolation.namespaces import close_off, enter_namespaces, watch_over
from skyrl_gym.isolation.processes import cpu_seconds_of, descendants, memory_of, n_threads_of

READY = "ready"  # the first line, once the program can be run
THREADS_PER_PROCESS = 8  # counted over all
WATCH_SECONDS = 0.02  # how often processes and memory are counted
CHUNK = 1 << 16  # bytes read at once

Json = Mapping[str, Any]


def main() -> None:
    """Close off, do the job, and leave nothing."""
    with os.fdopen(os.dup(0), "rb") as stdin:
        job = json.load(stdin)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # the first process of a namespace gets no signal that it has no use for
    if job["level"] == "namespaces":
        enter_namespaces()
        watch_over(lambda: _begin_alone(job))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what leaves its parents becomes ours
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(job["folder"])
    _do(job)


def _begin_alone(job: Json) -> None:
    close_off(job["folder"], job["limits"]["disk_bytes"], job["python"])
    _do(job)


def _do(job: Json) -> None:
    """Every run, one after the other."""
    prctl(PR_SET_DUMPABLE, 0)  # nobody may look into this process, or write for it
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        out.write(f"{READY}\n")
        out.flush()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for run in job["runs"]:
            outcome = Run(job, run, job["limits"], is_alone=job["level"] == "namespaces").play()
            out.write(json.dumps(outcome) + "\n")
            out.flush()
            _empty(os.getcwd())


def _empty(folder: str) -> None:
    """Remove what a run has left; nobody is there to write more."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


class Run:
    """One run of the program, in a child of this process."""

    def __init__(self, program: Json, run: Json, limits: Json, *, is_alone: bool) -> None:
        self._program = program
        self._run = run
        self._limits = limits
        self._is_alone = is_alone
        self._pid = 0
        self._status: int | None = None
        self._end = ""
        self._streams: dict[int, tuple[str, bytearray]] = {}  # by descriptor

    def play(self) -> dict[str, Any]:
        """Start the child, listen until it ends or must be ended, and say how that was."""
        started, computed = time.monotonic(), _cpu_seconds_of_children()
        with selectors.DefaultSelector() as selector:
            self._start(selector)
            self._listen(selector, started + self._limits["seconds"])
            self._end_all()
            self._drain(selector)
        for fd in self._streams:
            os.close(fd)
        texts = {name: read.decode("utf-8", "replace") for name, read in self._streams.values()}
        return {
            "end": self._end,
            "status": self._status,
            "seconds": time.monotonic() - started,
            "cpu_seconds": _cpu_seconds_of_children() - computed,
            **texts,
        }

    def _start(self, selector: selectors.BaseSelector) -> None:
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "result")}
        self._pid = os.fork()
        if self._pid == 0:
            writing = {name: ends[1] for name, ends in pipes.items()}
            become_the_program(self._program, self._run, self._limits, writing, is_alone=self._is_alone)
        for name, (reading, written) in pipes.items():
            os.close(written)
            os.set_blocking(reading, False)
            self._streams[reading] = (name, bytearray())
            selector.register(reading, selectors.EVENT_READ)

    def _listen(self, selector: selectors.BaseSelector, deadline: float) -> None:
        while not self._end:
            for key, _ in selector.select(min(WATCH_SECONDS, max(0.0, deadline - time.monotonic()))):
                self._read(key.fd, selector)
            if not self._end:
                self._end = self._reason_to_end(deadline)

    def _reason_to_end(self, deadline: float) -> str:
        if self._has_ended():
            return "exit"
        if time.monotonic() >= deadline:
            return "time"
        processes = self._processes()
        if sum(map(cpu_seconds_of, processes)) > self._limits["cpu_seconds"]:
            return "time"
        n_most = self._limits["n_processes"]
        if len(processes) > n_most or sum(map(n_threads_of, processes)) > n_most * THREADS_PER_PROCESS:
            return "processes"
        return "memory" if sum(map(memory_of, processes)) > self._limits["memory_bytes"] else ""

    def _read(self, fd: int, selector: selectors.BaseSelector) -> bool:
        """Take what a stream has; whether there may be more. One that says too much ends the run."""
        _, read = self._streams[fd]
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            selector.unregister(fd)
            return False
        room = self._limits["output_bytes"] - len(read)
        read += chunk[:room]
        if len(chunk) > room and self._end in ("", "exit"):
            self._end = "output"
        return len(chunk) <= room

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """What was written before the end is still in the pipes; nobody is left to write more."""
        for fd in self._streams:
            while fd in selector.get_map() and self._read(fd, selector):
                pass

    def _has_ended(self) -> bool:
        """Whether the child has; others that ended are buried on the way."""
        while self._status is None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return False
            self._note(pid, status)
        return True

    def _note(self, pid: int, status: int) -> None:
        if pid == self._pid:
            self._status = os.waitstatus_to_exitcode(status)

    def _end_all(self) -> None:
        """Kill the child and whatever came from it, wherever it went, until there is nothing left."""
        with suppress(ChildProcessError):
            while True:
                self._kill_all()
                self._note(*os.waitpid(-1, 0))

    def _kill_all(self) -> None:
        # In a namespace of its own, -1 is every process but this one, which is its first.
        targets = [-1] if self._is_alone else [*self._processes(), *([self._pid] if self._status is None else [])]
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[int]:
        """Every process of the run."""
        if self._is_alone:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return descendants(os.getpid())


def _cpu_seconds_of_children() -> float:
    """Of all that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
