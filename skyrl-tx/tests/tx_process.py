"""The server as users start it, in a process that can be killed and started again."""

from __future__ import annotations

import socket
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

SECONDS = 60
"""For what takes a few."""


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """A server with its state in a folder, always at the same port."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        told = () if "--base-model" in arguments else ("--base-model", BASE_MODEL)
        self._command = ("--checkpoints-base", str(folder), "--port", str(self.port), *told, *arguments)
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
            command = (sys.executable, "-m", "tx.tinker.api", *self._command)
            self.child = subprocess.Popen(command, env=self._environment, stderr=log, stdin=subprocess.DEVNULL)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.child.poll() is None:
            try:
                httpx.get(f"{self.url}/api/v1/healthz")
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(f"the server did not start: {self.log[-3000:]}")

    @property
    def engine(self) -> psutil.Process:
        """Its engine, once that is up."""
        (child,) = psutil.Process(self.child.pid).children()
        return child

    def sdk(self) -> tinker.ServiceClient:
        """The real client."""
        return tinker.ServiceClient(base_url=self.url, api_key="tml-test")  # pragma: allowlist secret

    def kill(self) -> None:
        """As a machine's memory keeper does it; its engine ends by itself."""
        engines = psutil.Process(self.child.pid).children()
        self.child.kill()
        self.child.wait()
        _, alive = psutil.wait_procs(engines, SECONDS)
        assert not alive


@contextmanager
def process(folder: Path, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """A server, which is killed in the end."""
    server = ServerProcess(folder, arguments, environment)
    try:
        yield server
    finally:
        if server.child.poll() is None:
            server.kill()
