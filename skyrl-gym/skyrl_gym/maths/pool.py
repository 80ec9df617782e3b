"""Worker processes that compare answers.

Each is a `python -m skyrl_gym.maths`, and is killed when its time is up, when it is spent, by `close`, and at the
latest when the process that started it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

START_SECONDS = 60.0  # to import sympy on a busy machine
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")


class Pool:
    """At most `size` workers; one is started when no other is free."""

    def __init__(self, size: int) -> None:
        self._slots = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False

    def ask(self, question: list[Any], limit_s: float) -> bool | None:
        """A worker's verdict. A worker that gives none, or is spent, is ended.

        Raises:
            TimeoutError: it takes longer than `limit_s`.
            ConnectionError: it died.
            RuntimeError: it does not start, or the pool was closed.
        """
        with self._slots:
            worker = self._take()
            is_fit = False
            try:
                verdict = worker.ask(question, limit_s)
                is_fit = not verdict["is_spent"]
            except ConnectionError:
                self._refuse_if_closed()
                raise
            finally:
                self._give_back(worker, is_fit)
        is_correct: bool | None = verdict["is_correct"]
        return is_correct

    def close(self) -> None:
        """End every worker. A thread that waits for one finds it dead, and closes its line."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for worker in idle:
            worker.close()
        for worker in busy:
            worker.kill()

    def _take(self) -> Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    self._busy.add(worker)
                    return worker
                worker.close()
        self._refuse_if_closed()
        worker = Worker()  # without the lock: it takes a second
        with self._lock:
            self._busy.add(worker)
        if self._is_closed:
            self._give_back(worker, False)
            self._refuse_if_closed()
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
            raise RuntimeError("skyrl_gym.maths.close() was called while an answer was verified; verify it again")


class Worker:
    """One process that compares answers, and the line to it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -P: nothing that lies about in this folder is imported.
                    [sys.executable, "-P", "-m", "skyrl_gym.maths", str(theirs.fileno())],
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
        try:
            self._read(START_SECONDS)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise RuntimeError(
                f"a worker of skyrl_gym.maths did not start ({error}); its own words stand above. "
                f"Try: {sys.executable} -c 'import math_verify'"
            ) from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: list[Any], limit_s: float) -> dict[str, Any]:
        """The verdict; raises TimeoutError, or ConnectionError when the process ends."""
        self._line.settimeout(limit_s)
        self._line.sendall(json.dumps(question).encode() + b"\n")
        verdict: dict[str, Any] = self._read(limit_s)
        return verdict

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
        if not answer:
            raise ConnectionResetError("it ended")
        return json.loads(answer)


def environment() -> dict[str, str]:
    """No secrets, and the path on which this process finds its modules."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"PYTHONPATH": paths}
