"""Tools of servers that speak the Model Context Protocol, by the package mcp.

A group is one session: what a server remembers of it, no other sees. A call is never repeated, for it may have changed
something. All sessions of a process live in one thread, which ends with the last of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.core import ToolGroup

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
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

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"an MCP server has either a command or a url; got {self}")


class _Sessions:
    """The thread in which sessions live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_users = 0
        self._running: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None

    def enter(self) -> BlockingPortal:
        """The way into the thread, which runs from now on."""
        from anyio.from_thread import start_blocking_portal

        with self._lock:
            if self._portal is None:
                self._running = start_blocking_portal(name="mcp-sessions")
                self._portal = self._running.__enter__()
            self._n_users += 1
            return self._portal

    def leave(self) -> None:
        """What `enter` began; the last one ends the thread."""
        with self._lock:
            self._n_users -= 1
            if self._n_users == 0:
                assert self._running is not None
                running, self._running, self._portal = self._running, None, None
                running.__exit__(None, None, None)


_sessions = _Sessions()


class MCPToolGroup(ToolGroup):
    """The tools of one server."""

    def __init__(self, name: str, server: MCPServerConfig) -> None:
        """Begin a session.

        Raises:
            ToolFailure: the server cannot be reached, or does not speak the protocol.
            ModuleNotFoundError: the package mcp is not installed.
        """
        super().__init__(name)
        self._server = server
        self._schemas: dict[str, dict[str, Any]] = {}
        self._closing: AbstractContextManager[Client] | None = None
        try:
            import mcp  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tools of MCP servers need the package mcp: pip install 'skyrl-gym[mcp]'"
            ) from error
        portal = _sessions.enter()
        try:
            session = portal.wrap_async_context_manager(_session(server))
            self._client = session.__enter__()
            self._closing = session
            self._portal = portal
            self._schemas = portal.call(_schemas, self._client)
        except BaseException as error:
            self._leave()
            if not isinstance(error, Exception):
                raise
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
        if self._closing is None:
            raise ToolFailure(f"the session with the MCP server {self._name} is closed")
        try:
            result = self._portal.call(_call, self._client, name, dict(arguments))
        except Exception as error:
            raise ToolFailure(f"the MCP server {self._name}, tool {name}: {_reason(error)}") from error
        text = "\n".join(_text(content) for content in result.content)
        if result.is_error:
            raise ToolCallError(text or f"{name} failed")
        return text

    def close(self) -> None:
        """End the session, and the server if it was started for it."""
        if self._closing is not None:
            self._leave()

    def _leave(self) -> None:
        session, self._closing = self._closing, None
        try:
            if session is not None:
                session.__exit__(None, None, None)
        except Exception:  # it has died before; what it held is released all the same
            logger.debug("the session with the MCP server %s ended badly", self._name, exc_info=True)
        finally:
            _sessions.leave()


def _session(server: MCPServerConfig) -> Any:
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


def _text(content: Any) -> str:
    text = getattr(content, "text", None)
    return text if isinstance(text, str) else f"[{content.type}]"


def _reason(error: BaseException) -> str:
    """The first error in what task groups make of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
