"""Worker processes that answer questions, for work that nothing but the end of a process can stop.

    pool = Pool("skyrl_gym.maths", size=8)
    pool.ask([answer, gold, 5.0], limit_s=5.0)    # {"is_correct": True, …}

A worker is a `python -m MODULE FD`, see `worker_pool.serving`. It is killed when its time is up, when it is spent, by
`close`, and at the latest when the process that started it ends.
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

START_SECONDS = 60.0  # to import what it needs on a busy machine
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")


class Pool:
    """At most `size` workers of a module; one is started when no other is free. Any thread may ask.

    After `close`, which is called at exit, the next question starts new ones. A forked child has its own.
    """

    def __init__(self, module: str, size: int) -> None:
        self._module, self._size = module, size
        self._workers: Workers | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def ask(self, question: list[Any], limit_s: float) -> dict[str, Any]:
        """A worker's answer. Waiting for a free worker is not counted.

        Raises:
            TimeoutError: it takes longer than `limit_s` seconds.
            ConnectionError: the worker died.
            RuntimeError: it does not start, or `close` was called meanwhile.
        """
        return self.workers().ask(question, limit_s)

    def workers(self) -> Workers:
        """The present ones."""
        with self._lock:
            self._workers = self._workers or Workers(self._module, self._size)
            return self._workers

    def close(self) -> None:
        """End all workers, those at work too."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _forget(self) -> None:
        """In a forked child: the workers are the parent's."""
        self._workers, self._lock = None, threading.Lock()


class Workers:
    """The workers of a pool until it is closed."""

    def __init__(self, module: str, size: int) -> None:
        self._module = module
        self._slots = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False

    def ask(self, question: list[Any], limit_s: float) -> dict[str, Any]:
        """See `Pool.ask`. A worker that gives no answer, or is spent, is ended."""
        with self._slots:
            worker = self._take()
            is_fit = False
            try:
                answer = worker.ask(question, limit_s)
                is_fit = not answer["is_spent"]
            except ConnectionError:
                self._refuse_if_closed()
                raise
            finally:
                self._give_back(worker, is_fit)
        return answer

    def close(self) -> None:
        """End every worker, also those that start. A thread that waits for one finds it dead, and closes its line."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for worker in idle:
            worker.close()
        for worker in busy:
            worker.kill()

    def idle_pids(self) -> list[int]:
        """The processes that wait for a question."""
        with self._lock:
            return [worker.pid for worker in self._idle]

    def _take(self) -> Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    self._busy.add(worker)
                    return worker
                worker.close()
            self._refuse_if_closed()
            worker = Worker(self._module)  # under the lock, so that `close` ends it
            self._busy.add(worker)
        try:
            worker.wait_until_ready()  # without the lock: imports take a second
        except BaseException:
            self._give_back(worker, False)
            self._refuse_if_closed()
            raise
        return worker

    def _give_back(self, worker: Worker, is_fit: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            is_kept = is_fit and not self._is_closed
            if is_kept:
                self._idle.append(worker)
        if not is_kept:
            worker.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the workers of {self._module} were closed while one was asked; ask again")


class Worker:
    """One process, and the line to it."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._line, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -P: nothing that lies about in this folder is imported.
                    [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment(),
                )
            except BaseException:
                self._line.close()
                raise
        self._reader = self._line.makefile("rb")

    def wait_until_ready(self) -> None:
        """Wait until the process has imported what it needs; RuntimeError if it ends or takes too long."""
        try:
            self._read(START_SECONDS)
        except OSError as error:
            message = f"a worker of {self._module} did not start ({error}); its own words stand above"
            raise RuntimeError(message) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: list[Any], limit_s: float) -> dict[str, Any]:
        """Its answer; raises TimeoutError, or ConnectionError when the process ends."""
        self._line.settimeout(limit_s)
        self._line.sendall(json.dumps(question).encode() + b"\n")
        answer: dict[str, Any] = self._read(limit_s)
        return answer

    def kill(self) -> None:
        """End the process and its group, and wait until it is gone."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill, and close the line."""
        self.kill()
        self._reader.close()
        self._line.close()

    def _read(self, limit_s: float) -> Any:
        self._line.settimeout(limit_s)
        answer = self._reader.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("it ended")
        return json.loads(answer)


def environment() -> dict[str, str]:
    """No secrets, and the path on which this process finds its modules."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"PYTHONPATH": paths}
