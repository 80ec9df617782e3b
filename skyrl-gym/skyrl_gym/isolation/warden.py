"""The process that supervises an untrusted program. `program.py` starts it as a script.

It reads a job from standard input and writes one line of JSON per run.

At the level `namespaces`, the program is alone in a process namespace, and ending the namespace kills everything in it.
At the other levels, it is a process group that nothing can leave, with a separate user if this process is root.
"""

import json
import os
import resource
import selectors
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from skyrl_gym.isolation.cgroup import count_killed
from skyrl_gym.isolation.child import THREADS_PER_PROCESS, Confinement, run_and_exit
from skyrl_gym.isolation.credentials import throwaway_user
from skyrl_gym.isolation.files import clear_folder, file_bytes
from skyrl_gym.isolation.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl
from skyrl_gym.isolation.namespaces import enter_namespaces, isolate_files, run_as_init
from skyrl_gym.isolation.processes import GROUP, all_processes, cpu_seconds, members, memory_bytes, n_threads

READY = "ready"  # the first line, once the program can be run
WATCH_SECONDS = 0.02  # between checks of processes and memory
CHUNK_BYTES = 1 << 16

Json = Mapping[str, Any]


def main() -> None:
    """Read the job, isolate this process, and execute the runs."""
    with os.fdopen(os.dup(0), "rb") as stdin:
        job = json.load(stdin)
    # The first process of a namespace does not receive signals without a handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # We inherit the trainer's handling of SIGCHLD. If it is ignored, waitpid() loses exit statuses.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if job["level"] == "namespaces":
        enter_namespaces()
        run_as_init(lambda: _do_isolated(job))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become our children
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(job["folder"])
    user = throwaway_user()
    if user is not None:
        os.chown(".", user, user)
    _do(job, user)


def _do_isolated(job: Json) -> None:
    isolate_files(job["folder"], job["limits"]["disk_bytes"], job["python_folders"])
    _do(job)


def _do(job: Json, user: int | None = None) -> None:
    """Execute the job's runs in order, as `user` unless it is None, and write a line of JSON for each."""
    prctl(PR_SET_DUMPABLE, 0)  # protects this process's memory and output from the program
    confinement = Confinement(job["level"], user, job["cgroup"], job["python_folders"])
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        out.write(f"{READY}\n")
        out.flush()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for run in job["runs"]:
            result = ProgramRun(job, run, job["limits"], confinement).execute()
            out.write(json.dumps(result) + "\n")
            out.flush()
            clear_folder(os.getcwd())


class ProgramRun:
    """A run of the program, in a child of this process.

    EOF on the pipe does not mean that the program has exited: a background process can hold the pipe open, and a
    program can close its pipe and keep running. So the run has three steps, in this order:

    1. Watch: every `WATCH_SECONDS`, read the output so far and check the limits, until the child exits or exceeds one.
    2. Kill and reap the child and all its descendants. A process could fork between a check and a kill, so the kill
       goes to the whole group, and is repeated until there are no children to wait for.
    3. Drain: read what is left in the pipes. All writers are dead, so EAGAIN or EOF means that a pipe is empty.

    For example, a program prints "3", starts `sleep 1000` in the background and exits. Its exit ends the watch, the
    `sleep` is killed, and the "3" is still in the pipe and is read.
    """

    def __init__(self, program: Json, run: Json, limits: Json, confinement: Confinement) -> None:
        self._program = program
        self._run = run
        self._limits = limits
        self._confinement = confinement
        self._pid = 0
        self._status: int | None = None
        self._end_reason = ""
        self._streams: dict[int, tuple[str, bytearray]] = {}  # by descriptor
        self._cpu_seconds_before = _children_cpu_seconds()
        self._n_killed_before = self._count_killed()

    def execute(self) -> dict[str, Any]:
        """Start the child and wait until it ends or hits a limit.

        Return the fields of a `ProgramResult`, or `{"failure": …}` if the program cannot be isolated.
        """
        started = time.monotonic()
        with selectors.DefaultSelector() as selector:
            self._start(selector)
            deadline = started + self._limits["seconds"]
            while not self._end_reason:
                for key, _ in selector.select(min(WATCH_SECONDS, max(0.0, deadline - time.monotonic()))):
                    self._read(key.fd, selector)
                if not self._end_reason:
                    self._end_reason = self._check_limits(deadline)
            self._kill_and_reap_all()
            for fd in self._streams:  # all writers are dead, so EAGAIN or EOF means empty
                while fd in selector.get_map() and self._read(fd, selector):
                    pass
        if self._count_killed() > self._n_killed_before:
            self._end_reason = "memory"
        for fd in self._streams:
            os.close(fd)
        texts = {name: buffer.decode("utf-8", "replace") for name, buffer in self._streams.values()}
        if failure := texts.pop("failure"):
            return {"failure": failure}
        return {
            "end": self._end_reason,
            "status": self._status,
            "seconds": time.monotonic() - started,
            "cpu_seconds": _children_cpu_seconds() - self._cpu_seconds_before,
            **texts,
        }

    def _start(self, selector: selectors.BaseSelector) -> None:
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "result", "failure")}
        self._pid = os.fork()
        if self._pid == 0:
            write_ends = {name: write_end for name, (_, write_end) in pipes.items()}
            run_and_exit(self._program, self._run, self._limits, write_ends, self._confinement)
        if not self._confinement.is_alone:
            signal.signal(signal.SIGTERM, self._stop)  # in a namespace, the program could also send it
            with suppress(OSError):  # the child has done it already, and may have ended
                os.setpgid(self._pid, self._pid)
        for name, (read_end, write_end) in pipes.items():
            os.close(write_end)
            os.set_blocking(read_end, False)
            self._streams[read_end] = (name, bytearray())
            selector.register(read_end, selectors.EVENT_READ)

    def _check_limits(self, deadline: float) -> str:
        """Return why the run is over, or an empty string if it is not."""
        if self._has_exited():
            return "exit"
        if time.monotonic() >= deadline:
            return "time"
        processes = self._processes()
        max_cpu_seconds = self._limits["cpu_seconds"]
        # Measure twice: a process that is reaped during one measurement is counted twice in it.
        if all(self._cpu_seconds(processes) > max_cpu_seconds for _ in range(2)):
            return "time"
        max_processes = self._limits["n_processes"]
        if len(processes) > max_processes or sum(map(n_threads, processes)) > max_processes * THREADS_PER_PROCESS:
            return "processes"
        if self._count_killed() > self._n_killed_before:
            return "memory"
        if sum(map(memory_bytes, processes)) > self._limits["memory_bytes"]:
            return "memory"
        return "disk" if self._file_bytes(processes) > self._limits["disk_bytes"] else ""

    def _cpu_seconds(self, processes: list[int]) -> float:
        """Return the run's CPU time, including orphans that this process has reaped."""
        return sum(map(cpu_seconds, processes)) + _children_cpu_seconds() - self._cpu_seconds_before

    def _file_bytes(self, processes: list[int]) -> int:
        """Return the size of the run's files, if no file system limits it."""
        if self._confinement.is_alone:
            return 0
        with self._confinement.as_user():  # root sees another user's open files only with a capability
            return file_bytes(".", processes)  # the user may not enter the folders around it

    def _count_killed(self) -> int:
        return count_killed(self._confinement.cgroup[1]) if self._confinement.cgroup else 0

    def _read(self, fd: int, selector: selectors.BaseSelector) -> bool:
        """Read a chunk of a stream. Return True if there may be more. Too much output ends the run."""
        _, buffer = self._streams[fd]
        try:
            chunk = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            selector.unregister(fd)
            return False
        room = self._limits["output_bytes"] - len(buffer)
        buffer += chunk[:room]
        if len(chunk) > room and self._end_reason in ("", "exit"):
            self._end_reason = "output"
        return len(chunk) <= room

    def _has_exited(self) -> bool:
        """Return True if the child has exited. Also reap other exited processes."""
        while self._status is None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return False
            self._record_exit(pid, status)
        return True

    def _record_exit(self, pid: int, status: int) -> None:
        if pid == self._pid:
            self._status = os.waitstatus_to_exitcode(status)

    def _stop(self, *_: object) -> None:
        """End this process and the run: the caller needs no more results."""
        self._kill_and_reap_all()
        os._exit(0)

    def _kill_and_reap_all(self) -> None:
        """Kill the child and all its descendants until none is left."""
        with suppress(ChildProcessError):
            while True:
                self._kill_all()
                self._record_exit(*os.waitpid(-1, 0))

    def _kill_all(self) -> None:
        # In a process namespace, -1 means every process except this one, the first. Otherwise nothing leaves the group.
        target = -1 if self._confinement.is_alone else -self._pid
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)

    def _processes(self) -> list[int]:
        """Return the ids of all processes of the run."""
        if self._confinement.is_alone:
            return [pid for pid in all_processes() if pid != 1]
        return members(GROUP, self._pid)


def _children_cpu_seconds() -> float:
    """Return the CPU time of all ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
