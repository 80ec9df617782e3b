"""The contract with servers of the package openenv."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from gym_kit.openenv_contract import OpenEnvContract, OpenEnvToolContract
from gym_kit.processes import free_port
from gym_kit.servers import run_server

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-openenv/bin/python"


@dataclass(frozen=True)
class RunningServer:
    """A server and its maximum number of sessions."""

    url: str
    capacity: int
    process: subprocess.Popen[bytes]
    tool: str = "repeat"


@contextmanager
def running(name: str, capacity: int) -> Iterator[RunningServer]:
    port = free_port()
    with run_server([str(PYTHON), str(HERE / "serve.py"), name, str(port), str(capacity)], port) as process:
        yield RunningServer(f"http://127.0.0.1:{port}", capacity, process)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running("echo", 16) as server:
        yield server


@pytest.fixture(scope="module")
def tool_server() -> Iterator[RunningServer]:
    with running("tools", 16) as server:
        yield server


class TestEcho(OpenEnvContract):
    """An environment with one field of text."""


class TestTools(OpenEnvToolContract):
    """An environment built on MCP."""
