import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from gym_kit.processes import children, no_leaks
from gym_kit.servers import MCP_SERVER, run_mcp_server

from skyrl_gym.error import ToolFailure
from skyrl_gym.images import read_parts
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.mcp import MCPServerConfig, MCPToolGroup

pytestmark = pytest.mark.usefixtures("frozen_objects")

PIPES = MCPServerConfig(command=sys.executable, args=[MCP_SERVER], timeout=20)
TOOLS = [
    *("add_note", "attach", "count", "draw", "end", "environment", "fail", "list_projects", "numbers", "one_project"),
    *("read_notes", "refuse", "wait"),
]


@pytest.fixture(scope="module")
def http() -> Iterator[MCPServerConfig]:
    with run_mcp_server() as url:
        yield MCPServerConfig(url=url, timeout=20)


@pytest.fixture(scope="module", params=["pipes", "http"])
def group(request: pytest.FixtureRequest) -> Iterator[MCPToolGroup]:
    """Return a session that all tests of a transport share."""
    group = MCPToolGroup("notes", PIPES if request.param == "pipes" else request.getfixturevalue("http"))
    yield group
    group.close()
    group.close()


def test_tools_of_the_server_are_offered(group: MCPToolGroup) -> None:
    assert group.get_tool_names() == TOOLS
    function = next(schema["function"] for schema in group.get_schemas() if schema["function"]["name"] == "add_note")
    assert function["description"] == "Keep a note."
    assert function["parameters"]["required"] == ["text"]
    assert group.call("add_note", {"text": "milk"}).endswith("notes")
    assert group.call("wait", {"seconds": "0"}) == "done"  # formats of plain text write all arguments as text
    assert group.execute_tool("read_notes", joined_by="; ").endswith("milk")
    with pytest.raises(ValueError, match="Tool 'nothing' not found in ToolGroup 'notes'"):
        group.execute_tool("nothing")


@pytest.mark.parametrize(
    ("tool", "arguments", "error", "message"),
    [
        ("fail", {"reason": "out of paper"}, ToolCallError, "out of paper"),
        ("add_note", {}, ToolCallError, "text"),
        ("nothing", {}, ToolCallError, "There is no tool 'nothing'. Tools: add_note, attach"),
        ("refuse", {}, ToolCallError, "The arguments of refuse are wrong: not these"),
        ("refuse", {"is_internal": True}, ToolFailure, "tool refuse: MCPError: not these"),
    ],
)
def test_error_of_a_call_leaves_the_session_open(
    group: MCPToolGroup, tool: str, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        group.call(tool, arguments)
    assert group.call("read_notes", {}) is not None


def test_text_of_resources_and_structured_content(group: MCPToolGroup) -> None:
    assert group.call("attach", {}) == "milk and tea\n[resource]"
    assert group.call("count", {}).startswith('{"n_notes": ')
    projects = 'list_projects returned 2 items.\n{"projects": [{"id": 1}, {"id": 2}]}'
    assert group.call("list_projects", {}) == projects
    assert group.call("numbers", {}) == "3\n5"  # a text that repeats the values is enough
    assert json.loads(str(group.call("one_project", {}))) == {"id": 1}
    assert group.call("draw", {"text": "Look:"}) == 'Look:\n[image]\n{"drawn": 1}'


def test_images_are_parts_of_a_result(http: MCPServerConfig) -> None:
    group = MCPToolGroup("notes", http, shows_images=True)
    content = read_parts(group.call("draw", {"text": "Look:"}))
    group.close()
    assert isinstance(content, list)
    assert [part.get("text") for part in content] == ["Look:", "\n", None, "\n", '{"drawn": 1}']
    assert content[2]["image"].open().getpixel((0, 0)) == (255, 0, 0)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Restore the handler of SIGINT, which a shell makes background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_interrupted_start_leaves_nothing_behind(http: MCPServerConfig) -> None:
    """A user may press Ctrl-C while a server starts."""
    silent = MCPServerConfig(command=sys.executable, args=["-c", "import time; time.sleep(100)"], timeout=100)
    with no_leaks():
        other = MCPToolGroup("notes", http)
        before = children()
        threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            MCPToolGroup("silent", silent)
        assert children() == before
        assert other.call("add_note", {"text": "milk"}).endswith("notes")
        other.close()


@pytest.mark.parametrize("group", ["pipes"], indirect=True)
def test_servers_over_pipes_share_nothing(group: MCPToolGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither notes with each other, nor variables of the environment with the trainer."""
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    group.call("add_note", {"text": "milk"})
    coloured = MCPServerConfig(command=sys.executable, args=[MCP_SERVER], env={"COLOUR": "ultramarine"})
    other = MCPToolGroup("notes", coloured)
    assert other.call("read_notes", {}) == ""
    variables = other.call("environment", {})
    other.close()
    assert "ultramarine" in variables
    assert "hunter2" not in variables
    assert group.call("read_notes", {}).endswith("milk")


def test_server_that_hangs_or_ends_is_a_tool_failure() -> None:
    with no_leaks():
        group = MCPToolGroup("notes", MCPServerConfig(command=sys.executable, args=[MCP_SERVER], timeout=10))
        started = time.monotonic()
        with pytest.raises(ToolFailure, match="the MCP server notes, tool wait: "):
            group.call("wait", {"seconds": 600})
        assert time.monotonic() - started < 500
        for tool in ("end", "read_notes"):
            with pytest.raises(ToolFailure, match=f"the MCP server notes, tool {tool}: "):
                group.call(tool, {})
        group.close()
        with pytest.raises(ToolFailure, match="is closed"):
            group.call("read_notes", {})


@pytest.mark.parametrize(
    "config",
    [
        MCPServerConfig(command="/nowhere/server"),
        MCPServerConfig(command=sys.executable, args=["-c", "print('no protocol')"], timeout=5),
        MCPServerConfig(url="http://127.0.0.1:1/mcp", timeout=5),
    ],
)
def test_server_that_cannot_be_reached_is_a_tool_failure(config: MCPServerConfig) -> None:
    with no_leaks(), pytest.raises(ToolFailure, match="the MCP server notes"):
        MCPToolGroup("notes", config)


def test_server_needs_either_a_command_or_a_url() -> None:
    for wrong in ({}, {"command": "x", "url": "y"}):
        with pytest.raises(ValueError, match="either a command or a url"):
            MCPServerConfig(**wrong)


def test_concurrent_sessions_leave_nothing_behind(http: MCPServerConfig) -> None:
    def work(n: int) -> str:
        group = MCPToolGroup("notes", http)
        try:
            return group.call("read_notes", {"joined_by": str(n)})
        finally:
            group.close()

    with no_leaks(), ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, range(8)))) == 8
