"""The server as users start it, in a process that can be killed and started again."""

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
from tx_postgresql import url_for
from tx_server import BASE_MODEL, CHILD_ENVIRONMENT

SECONDS = 120
"""For what takes a few on a machine that does nothing else."""


class ServerProcess:
    """A server with its state in a folder, always at the same port."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = 0  # any, when it starts for the first time
        told = () if "--base-model" in arguments else ("--base-model", BASE_MODEL)
        self._command = (sys.executable, "-m", "tx.run.main", "serve", "--checkpoints-base", str(folder))
        self._arguments = (*told, *arguments)
        self._environment = {**CHILD_ENVIRONMENT, "TX_DATABASE_URL": url_for(folder), **environment}
        self._log = folder.with_suffix(".log")
        self.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has said."""
        return self._log.read_text()

    def start(self) -> None:
        """Again."""
        with self._log.open("a") as log:
            n_said = len(self.log)
            command = (*self._command, f"--port={self.port}", *self._arguments)
            self.child = subprocess.Popen(command, env=self._environment, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS
        while not (told := re.search(r"serving \S+ at http://127\.0\.0\.1:(\d+),", self.log[n_said:])):
            if time.monotonic() > deadline or self.child.poll() is not None:
                raise AssertionError(f"the server did not start: {self.log[-3000:]}")
            time.sleep(0.05)
        self.port = int(told[1])

    def wait_for_engine(self) -> None:
        """Until the server knows of its model what the engine alone can tell."""
        deadline = time.monotonic() + SECONDS
        while "max_context_length" not in httpx.get(f"{self.url}/api/v1/get_server_capabilities").text:
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.1)

    @property
    def engine(self) -> psutil.Process:
        """Its engine, once that is up."""
        (child,) = psutil.Process(self.child.pid).children()
        return child

    def client(self, **headers: str) -> httpx.Client:
        """Of HTTP, for what the SDK never sends."""
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30)

    def n_pending(self) -> int:
        """Requests that wait."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(
            int(float(number)) for number in re.findall(r"^tx_requests_pending\{.*\} (\S+)$", text, re.MULTILINE)
        )

    def sdk(self) -> tinker.ServiceClient:
        """The real client."""
        return tinker.ServiceClient(base_url=self.url, api_key="tml-test")  # pragma: allowlist secret

    def kill(self) -> None:
        """As a machine's memory keeper does it; its engine ends by itself."""
        self._end(signal.SIGKILL)

    def end(self) -> None:
        """As its user does it; its engine ends with it."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        engines = psutil.Process(self.child.pid).children()
        self.child.send_signal(number)
        assert self.child.wait(SECONDS) == -number, self.log[-3000:]
        _, alive = psutil.wait_procs(engines, SECONDS)
        assert not alive


@contextmanager
def process(folder: Path, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """A server, which ends in the end."""
    server = ServerProcess(folder, arguments, environment)
    try:
        yield server
        if server.child.poll() is None:
            server.end()
    finally:
        if server.child.poll() is None:
            server.kill()
