"""Tools of a real MCP server, over pipes and over HTTP."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.mcp import MCPServerConfig, MCPToolGroup

pytestmark = pytest.mark.usefixtures("frozen_objects")

SERVER = str(Path(__file__).with_name("mcp_server.py"))
PIPES = MCPServerConfig(command=sys.executable, args=[SERVER], timeout=20)


@pytest.fixture(scope="module")
def http() -> Iterator[MCPServerConfig]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield MCPServerConfig(url=f"http://127.0.0.1:{port}/mcp", timeout=20)
        process.kill()


@pytest.fixture(params=["pipes", "http"])
def config(request: pytest.FixtureRequest) -> MCPServerConfig:
    config: MCPServerConfig = PIPES if request.param == "pipes" else request.getfixturevalue("http")
    return config


def leaked_resources() -> tuple[int, list[str], int]:
    gc.collect()
    me = psutil.Process()
    names = [thread.name for thread in threading.enumerate() if "portal" in thread.name]
    return len(me.children(recursive=True)), names, me.num_fds()


def test_tools_of_the_server_are_offered(config: MCPServerConfig) -> None:
    group = MCPToolGroup("notes", config)
    assert group.get_tool_names() == [
        "add_note",
        "attach",
        "count",
        "end",
        "environment",
        "fail",
        "read_notes",
        "refuse",
        "wait",
    ]
    function = next(schema["function"] for schema in group.get_schemas() if schema["function"]["name"] == "add_note")
    assert function["description"] == "Keep a note."
    assert function["parameters"]["required"] == ["text"]
    assert group.call("add_note", {"text": "milk"}).endswith("notes")
    assert group.execute_tool("read_notes", joined_by="; ").endswith("milk")
    with pytest.raises(ValueError, match="Tool 'nothing' not found in ToolGroup 'notes'"):
        group.execute_tool("nothing")
    group.close()
    group.close()


def test_tool_errors_are_for_the_model(config: MCPServerConfig) -> None:
    group = MCPToolGroup("notes", config)
    with pytest.raises(ToolCallError, match="out of paper"):
        group.call("fail", {"reason": "out of paper"})
    with pytest.raises(ToolCallError, match="text"):
        group.call("add_note", {})
    assert group.call("read_notes", {}) is not None  # the session still works
    group.close()


def test_invalid_params_errors_are_for_the_model(config: MCPServerConfig) -> None:
    group = MCPToolGroup("notes", config)
    with pytest.raises(ToolCallError, match="The arguments of refuse are wrong: not these"):
        group.call("refuse", {})
    with pytest.raises(ToolFailure, match="tool refuse: MCPError: not these"):
        group.call("refuse", {"is_internal": True})
    assert group.call("read_notes", {}) is not None
    group.close()


def test_text_of_resources_and_structured_content(config: MCPServerConfig) -> None:
    group = MCPToolGroup("notes", config)
    assert group.call("attach", {}) == "milk and tea\n[resource]"
    assert group.call("count", {}).startswith('{"n_notes": ')
    group.close()


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Restore the handler of SIGINT, which a shell makes background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_interrupted_start_leaves_nothing_behind() -> None:
    """A user may press Ctrl-C while a server starts."""
    before = leaked_resources()
    silent = MCPServerConfig(command=sys.executable, args=["-c", "import time; time.sleep(100)"], timeout=100)
    group = MCPToolGroup("notes", PIPES)  # another session, which must survive
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        MCPToolGroup("silent", silent)
    assert len(psutil.Process().children(recursive=True)) == before[0] + 1
    assert group.call("add_note", {"text": "milk"}) == "1 notes"
    group.close()
    assert leaked_resources() == before


def test_sessions_over_pipes_share_nothing() -> None:
    first, second = (MCPToolGroup("notes", PIPES) for _ in range(2))
    first.call("add_note", {"text": "milk"})
    assert (first.call("read_notes", {}), second.call("read_notes", {})) == ("milk", "")
    first.close()
    assert second.call("add_note", {"text": "tea"}) == "1 notes"
    second.close()


def test_server_gets_only_the_configured_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    config = MCPServerConfig(command=sys.executable, args=[SERVER], env={"COLOUR": "ultramarine"})
    group = MCPToolGroup("notes", config)
    message = group.call("environment", {})
    assert "ultramarine" in message
    assert "hunter2" not in message
    group.close()


def test_server_that_ends_or_hangs_is_a_tool_failure() -> None:
    before = leaked_resources()
    dying = MCPToolGroup("notes", PIPES)
    with pytest.raises(ToolFailure, match="the MCP server notes, tool end: "):
        dying.call("end", {})
    with pytest.raises(ToolFailure):
        dying.call("read_notes", {})
    dying.close()
    slow = MCPToolGroup("notes", MCPServerConfig(command=sys.executable, args=[SERVER], timeout=3))
    started = time.monotonic()
    with pytest.raises(ToolFailure, match="the MCP server notes, tool wait: "):
        slow.call("wait", {"seconds": 60})
    slow.close()
    assert time.monotonic() - started < 50
    with pytest.raises(ToolFailure, match="is closed"):
        slow.call("read_notes", {})
    assert leaked_resources() == before


@pytest.mark.parametrize(
    "config",
    [
        MCPServerConfig(command="/nowhere/server"),
        MCPServerConfig(command=sys.executable, args=["-c", "print('no protocol')"], timeout=5),
        MCPServerConfig(url="http://127.0.0.1:1/mcp", timeout=5),
    ],
)
def test_server_that_cannot_be_reached_is_a_tool_failure(config: MCPServerConfig) -> None:
    before = leaked_resources()
    with pytest.raises(ToolFailure, match="the MCP server notes"):
        MCPToolGroup("notes", config)
    assert leaked_resources() == before


def test_server_needs_either_a_command_or_a_url() -> None:
    for wrong in ({}, {"command": "x", "url": "y"}):
        with pytest.raises(ValueError, match="either a command or a url"):
            MCPServerConfig(**wrong)


def test_concurrent_sessions_leave_nothing_behind(config: MCPServerConfig) -> None:
    before = leaked_resources()

    def work(n: int) -> str:
        group = MCPToolGroup("notes", config)
        try:
            return group.call("read_notes", {"joined_by": str(n)})
        finally:
            group.close()

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, range(8)))) == 8
    assert leaked_resources() == before
