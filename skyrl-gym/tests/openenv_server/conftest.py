"""Servers of the package openenv, which runs in `.venv-openenv` (`make test-openenv`)."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import urllib3

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-openenv/bin/python"


@dataclass(frozen=True)
class RunningServer:
    """A server and its maximum number of sessions."""

    url: str
    capacity: int
    tool: str
    process: subprocess.Popen[bytes]


@contextmanager
def running(name: str, capacity: int) -> Iterator[RunningServer]:
    """Run a server of `serve.py`."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [str(PYTHON), str(HERE / "serve.py"), name, str(port), str(capacity)]
    with subprocess.Popen(command) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process)
            yield RunningServer(f"http://127.0.0.1:{port}", capacity, "repeat", process)
        finally:
            process.kill()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            assert urllib3.request("GET", url, retries=False, timeout=5).status == 200
            return
        except urllib3.exceptions.HTTPError:
            assert process.poll() is None, "the server has ended; its words stand above"
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running("echo", 16) as server:
        yield server


@pytest.fixture(scope="module")
def tool_server() -> Iterator[RunningServer]:
    with running("tools", 16) as server:
        yield server
