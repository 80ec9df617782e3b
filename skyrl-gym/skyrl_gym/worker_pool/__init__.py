"""A pool of worker processes, for work that can only be stopped by killing a process.

    pool = Pool("skyrl_gym.maths", size=8)
    pool.ask([answer, gold, 5.0], limit_s=5.0)    # {"is_correct": True, …}

A worker runs `python -m MODULE FD` with the loop of `worker_pool.serving`. It is killed when a question exceeds its
time limit, when it is spent, by `close`, or at the latest when its parent exits.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

START_SECONDS = 60.0  # for the imports of a worker on a busy machine
PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")


class Pool:
    """A thread-safe pool of at most `size` workers of a module, started on demand.

    `close` is called at exit. The next question after it starts new workers. A forked child gets its own pool.
    """

    def __init__(self, module: str, size: int) -> None:
        self._module, self._size = module, size
        self._workers: Workers | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def ask(self, question: list[Any], limit_s: float) -> dict[str, Any]:
        """Ask a worker and return its answer. Waiting for a free worker does not count towards `limit_s`.

        Raises:
            TimeoutError: the answer takes longer than `limit_s` seconds.
            ConnectionError: the worker died.
            RuntimeError: a worker does not start, or `close` was called meanwhile.
        """
        return self.workers().ask(question, limit_s)

    def workers(self) -> Workers:
        """Return the current workers."""
        with self._lock:
            self._workers = self._workers or Workers(self._module, self._size)
            return self._workers

    def close(self) -> None:
        """End all workers, including busy ones."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _reset(self) -> None:
        """Drop the workers in a forked child: they belong to the parent."""
        self._workers, self._lock = None, threading.Lock()


class Workers:
    """The workers of a pool until it is closed."""

    def __init__(self, module: str, size: int) -> None:
        self._module = module
        self._slots = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[PoolWorker] = []
        self._busy: set[PoolWorker] = set()
        self._is_closed = False

    def ask(self, question: list[Any], limit_s: float) -> dict[str, Any]:
        """Return a worker's answer, as `Pool.ask`. End the worker if it does not answer or is spent."""
        with self._slots:
            worker = self._acquire()
            is_reusable = False
            try:
                answer = worker.ask(question, limit_s)
                is_reusable = not answer["is_spent"]
            except ConnectionError:
                self._raise_if_closed()
                raise
            finally:
                self._release(worker, is_reusable)
        return answer

    def close(self) -> None:
        """End every worker, including those still starting. Threads that wait for a worker close its connection."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for worker in idle:
            worker.close()
        for worker in busy:
            worker.kill()

    def idle_pids(self) -> list[int]:
        """Return the process ids of idle workers."""
        with self._lock:
            return [worker.pid for worker in self._idle]

    def _acquire(self) -> PoolWorker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    self._busy.add(worker)
                    return worker
                worker.close()
            self._raise_if_closed()
            worker = PoolWorker(self._module)  # under the lock, so that `close` ends it
            self._busy.add(worker)
        try:
            worker.wait_until_ready()  # without the lock, because imports take a second
        except BaseException:
            self._release(worker, False)
            self._raise_if_closed()
            raise
        return worker

    def _release(self, worker: PoolWorker, is_reusable: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            is_kept = is_reusable and not self._is_closed
            if is_kept:
                self._idle.append(worker)
        if not is_kept:
            worker.close()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the workers of {self._module} were closed during a question; ask again")


class PoolWorker:
    """A worker process and the connection to it."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._connection, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -P keeps modules of the current folder from being imported by accident.
                    [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment(),
                )
            except BaseException:
                self._connection.close()
                raise
        self._reader = self._connection.makefile("rb")

    def wait_until_ready(self) -> None:
        """Wait until the process has finished its imports. Raises RuntimeError if it ends or takes too long."""
        try:
            self._read(START_SECONDS)
        except OSError as error:
            message = f"a worker of {self._module} did not start ({error}); its error output is above"
            raise RuntimeError(message) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: list[Any], limit_s: float) -> dict[str, Any]:
        """Return the answer to a question. Raises TimeoutError, or ConnectionError if the process ends."""
        self._connection.settimeout(limit_s)
        self._connection.sendall(json.dumps(question).encode() + b"\n")
        answer: dict[str, Any] = self._read(limit_s)
        return answer

    def kill(self) -> None:
        """Kill the process and its group, and wait until they are gone."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close the connection."""
        self.kill()
        self._reader.close()
        self._connection.close()

    def _read(self, limit_s: float) -> Any:
        self._connection.settimeout(limit_s)
        answer = self._reader.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("the process ended")
        return json.loads(answer)


def environment() -> dict[str, str]:
    """Return a worker's environment variables: this process's module path, and no secrets."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    return {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ} | {"PYTHONPATH": paths}
