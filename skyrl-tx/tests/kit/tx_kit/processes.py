"""The server as users run it: a process that can be killed and restarted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import tinker

from tx_kit.databases import url_for
from tx_kit.servers import BASE_MODEL, CHILD_ENVIRONMENT

SECONDS = 120
"""Timeout for operations that take a few seconds on an idle machine."""


class ServerProcess:
    """A server with its state in a folder, always on the same port."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = 0  # chosen on the first start
        model_flag = () if "--base-model" in arguments else ("--base-model", BASE_MODEL)
        self._command = (sys.executable, "-m", "tx.run.main", "serve", "--checkpoints-base", str(folder))
        self._arguments = (*model_flag, *arguments)
        self._environment = {**CHILD_ENVIRONMENT, "TX_DATABASE_URL": url_for(folder), **environment}
        self._log = folder.with_suffix(".log")
        self.start()

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """The output of the server."""
        return self._log.read_text()

    def start(self) -> None:
        """Start or restart the server."""
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

    def wait_for_engine(self) -> None:
        """Wait until the server knows what only the engine can report."""
        deadline = time.monotonic() + SECONDS
        while "max_context_length" not in httpx.get(f"{self.url}/api/v1/get_server_capabilities").text:
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.1)

    @property
    def engine(self) -> psutil.Process:
        """Return the engine's process once it is up."""
        (child,) = psutil.Process(self.child.pid).children()
        return child

    def client(self, **headers: str) -> httpx.Client:
        """Return an HTTP client, for requests that the SDK never sends."""
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30)

    def n_pending(self) -> int:
        """Return the number of pending requests."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(
            int(float(number)) for number in re.findall(r"^tx_requests_pending\{.*\} (\S+)$", text, re.MULTILINE)
        )

    def sdk(self) -> tinker.ServiceClient:
        """Return a real client."""
        return tinker.ServiceClient(base_url=self.url, api_key="tml-test")  # pragma: allowlist secret

    def kill(self) -> None:
        """Kill the server, as an out-of-memory killer would; the engine exits by itself."""
        self._end(signal.SIGKILL)

    def end(self) -> None:
        """Stop the server, as its user would; the engine stops with it."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        engines = psutil.Process(self.child.pid).children()
        self.child.send_signal(number)
        assert self.child.wait(SECONDS) == -number, self.log[-3000:]
        _, alive = psutil.wait_procs(engines, SECONDS)
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
