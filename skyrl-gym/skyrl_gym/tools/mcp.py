"""Tools of servers that speak the Model Context Protocol, by the package mcp.

A group is one session: what a server remembers of it, no other sees. A call is never repeated, for it may have changed
something. All sessions of a process live in one thread, which ends with the last of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from skyrl_gym.error import ToolFailure
from skyrl_gym.optional import require
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.core import ToolGroup

if TYPE_CHECKING:
    from anyio import Event
    from anyio.from_thread import BlockingPortal, BlockingPortalProvider
    from mcp import Client


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MCPServerConfig:
    """Where a server is: a program that is started for the session, or an address."""

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)  # all that it sees of ours
    url: str | None = None
    timeout: float = 60.0  # seconds of a call
    prefix: str | None = None  # its tool `read` is called `<prefix>_read`, for servers that have tools of one name

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"an MCP server has either a command or a url; got {self}")


class MCPToolGroup(ToolGroup):
    """The tools of one server."""

    def __init__(self, name: str, server: MCPServerConfig) -> None:
        """Begin a session.

        Raises:
            ToolFailure: the server cannot be reached, or does not speak the protocol.
            ModuleNotFoundError: the package mcp is not installed.
        """
        super().__init__(name)
        require("mcp", "mcp", "tools of MCP servers")
        self._session = ExitStack()
        self._is_open = True
        try:
            with ExitStack() as begun:
                self._portal = begun.enter_context(_portals())
                self._client = begun.enter_context(_session(self._portal, name, server))
                self._schemas = self._portal.call(_schemas, self._client)
                self._session = begun.pop_all()
        except Exception as error:
            raise ToolFailure(f"the MCP server {name} ({server.command or server.url}): {_reason(error)}") from error

    def get_tool_names(self) -> list[str]:
        """See `ToolGroup`."""
        return sorted(self._schemas)

    def get_tool(self, name: str) -> Any:
        """See `ToolGroup`. The tool takes its arguments by name."""
        return (lambda **arguments: self.call(name, arguments)) if name in self._schemas else None

    def get_schemas(self) -> list[dict[str, Any]]:
        """See `ToolGroup`."""
        return [self._schemas[name] for name in self.get_tool_names()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolGroup`. What the server calls an error is for the model; what keeps it from answering is not."""
        from mcp.types import INVALID_PARAMS

        if not self._is_open:
            raise ToolFailure(f"the session with the MCP server {self._name} is closed")
        try:
            result = self._portal.call(_call, self._client, name, dict(arguments))
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:  # how some servers refuse arguments
                raise ToolCallError(f"The arguments of {name} are wrong: {error}") from error
            raise ToolFailure(f"the MCP server {self._name}, tool {name}: {_reason(error)}") from error
        text = _text(result)
        if result.is_error:
            raise ToolCallError(text or f"{name} failed")
        return text

    def close(self) -> None:
        """End the session, and the server if it was started for it."""
        self._is_open = False
        self._session.close()


@cache
def _portals() -> BlockingPortalProvider:
    """The thread in which all sessions of this process live, while there are any."""
    from anyio.from_thread import BlockingPortalProvider

    return BlockingPortalProvider()


@contextmanager
def _session(portal: BlockingPortal, name: str, server: MCPServerConfig) -> Iterator[Client]:
    """A session in a task of its own, since anyio wants it to be entered and left in the same one."""
    import anyio

    opened: Future[Client] = Future()
    is_over = portal.call(anyio.Event)
    living = portal.start_task_soon(_live, server, opened, is_over)
    try:
        client = opened.result()
    except BaseException:  # it failed; or we are interrupted, and it would go on
        living.cancel()
        wait([living])
        raise
    try:
        yield client
    finally:
        portal.call(is_over.set)
        wait([living])
        if not living.cancelled() and (error := living.exception()) is not None:  # it has let go of what it held
            logger.debug("the session with the MCP server %s ended badly", name, exc_info=error)


async def _live(server: MCPServerConfig, opened: Future[Client], is_over: Event) -> None:
    try:
        async with _client(server) as client:
            opened.set_result(client)
            await is_over.wait()
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
        raise


def _client(server: MCPServerConfig) -> Client:
    """The connection, as an asynchronous context."""
    from mcp import Client, StdioServerParameters, stdio_client

    if server.url is not None:
        return Client(server.url, read_timeout_seconds=server.timeout)
    assert server.command is not None
    parameters = StdioServerParameters(command=server.command, args=server.args, env=server.env or None)
    return Client(stdio_client(parameters), read_timeout_seconds=server.timeout)


async def _schemas(client: Client) -> dict[str, dict[str, Any]]:
    """Every tool of the server, in the form of `ToolGroup.get_schemas`, by name."""
    found: dict[str, dict[str, Any]] = {}
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            found[tool.name] = {"type": "function", "function": function}
        cursor = page.next_cursor
        if not cursor:
            return found


async def _call(client: Client, name: str, arguments: dict[str, Any]) -> Any:
    return await client.call_tool(name, arguments)


def _text(result: Any) -> str:
    """What a model reads of a result: its texts, or its values where it has nothing else."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text_of_part, result.content))


def _text_of_part(part: Any) -> str:
    text = getattr(getattr(part, "resource", part), "text", None)  # a file that is sent along has its text inside
    return text if isinstance(text, str) else f"[{part.type}]"


def _reason(error: BaseException) -> str:
    """The first error in what task groups make of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
