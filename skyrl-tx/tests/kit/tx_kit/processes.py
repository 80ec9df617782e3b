"""Processes that tests start and kill: Python programs, and the server as users run it."""

import atexit
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from train_kit.zygote import Zygote

from tx_kit.databases import url_for
from tx_kit.servers import BASE_MODEL, Address

SECONDS = 120
"""Timeout for operations that take a few seconds on an idle machine."""
PRELOADED = (
    "tx.run.status",
    "tx.run.train",
    "tx.tinker.api",
    "tx.tinker.backends.jax.backend",
    "tx.tinker.engine.loop",
    "tx.tinker.engine.watcher",
    "tx.tinker.store.state_lock",
)


@functools.cache
def zygote() -> Zygote:
    """Return the zygote of this pytest process, which is started at the first call."""
    folder = tempfile.TemporaryDirectory(prefix="tx-zygote-")
    started = Zygote(Path(folder.name), PRELOADED)
    atexit.register(folder.cleanup)
    atexit.register(started.close)
    return started


def python() -> str:
    """Return a Python that has imported the server and the engine: `subprocess.run([python(), "-m", …])`.

    Use `sys.executable` instead if the subject of the test is start-up, or the tree of processes.
    """
    return sys.executable if "TEST_REAL_PYTHON" in os.environ else str(zygote().python)


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of child processes, which import what the test imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def start_python(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([python(), *arguments], env=child_environment(), text=True, **options)


class ServerProcess(Address):
    """A server with its state in a folder, always on the same port."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = 0  # chosen on the first start
        model_flag = () if "--base-model" in arguments else ("--base-model", BASE_MODEL)
        self._command = (python(), "-m", "tx.run.main", "serve", "--checkpoints-base", str(folder))
        self._arguments = (*model_flag, *arguments)
        self._environment = child_environment(TX_DATABASE_URL=url_for(folder), **environment)
        self._log = folder.with_suffix(".log")
        self.start()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> None:
        with self._log.open("a") as log:
            n_said = len(self.log)
            command = (*self._command, f"--port={self.port}", *self._arguments)
            self.child = subprocess.Popen(command, env=self._environment, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS
        while not (match := re.search(r"serving \S+ at http://127\.0\.0\.1:(\d+),", self.log[n_said:])):
            if time.monotonic() > deadline or self.child.poll() is not None:
                raise AssertionError(f"the server did not start: {self.log[-3000:]}")
            time.sleep(0.05)
        self.port = int(match[1])
        self.process = self._find()

    def _find(self) -> psutil.Process:
        """Return the server's process, which is the zygote's child if it was started there."""
        if self._command[0] == sys.executable:
            return psutil.Process(self.child.pid)
        for candidate in psutil.Process(zygote().pid).children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if self.port in {one.laddr.port for one in candidate.net_connections("tcp")}:
                    return candidate
        raise AssertionError(f"no child of the zygote listens on port {self.port}")

    def wait_for_engine(self) -> None:
        """Wait until the server knows what only the engine can report."""
        deadline = time.monotonic() + SECONDS
        while "max_context_length" not in httpx.get(f"{self.url}/api/v1/get_server_capabilities").text:
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.1)

    @property
    def engine(self) -> psutil.Process:
        """Return the engine's process once it is up."""
        (child,) = self.process.children()
        return child

    def n_pending(self) -> int:
        numbers = re.findall(r"^tx_requests_pending\{.*\} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return int(sum(map(float, numbers)))

    def kill(self) -> None:
        """Kill the server, as an out-of-memory killer would; the engine exits by itself."""
        self._end(signal.SIGKILL)

    def end(self) -> None:
        """Stop the server, as its user would; the engine stops with it."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        programs = [self.process, *self.process.children()]
        self.child.send_signal(number)
        assert self.child.wait(SECONDS) == -number, self.log[-3000:]
        _, alive = psutil.wait_procs(programs, SECONDS)
        assert not alive


@contextmanager
def process(folder: Path, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """Run a server, and stop it after the test."""
    server = ServerProcess(folder, arguments, environment)
    try:
        yield server
        if server.child.poll() is None:
            server.end()
    finally:
        if server.child.poll() is None:
            server.kill()
