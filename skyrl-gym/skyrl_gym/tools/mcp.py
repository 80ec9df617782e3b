"""Tools of Model Context Protocol servers, with the package mcp.

Each group is a separate session and shares no server state with other groups. Calls are never retried, because they may
have side effects. All sessions of a process share one thread that ends with the last session.
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
from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.core import ToolGroup
from skyrl_gym.tools.messages import Content, join_contents

if TYPE_CHECKING:
    from anyio import Event
    from anyio.from_thread import BlockingPortal, BlockingPortalProvider
    from mcp import Client


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MCPServerConfig:
    """A server: either a program to start for each session, or a URL."""

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)  # the program inherits no other variables
    url: str | None = None
    timeout: float = 60.0  # seconds per call
    prefix: str | None = None  # renames its tool `read` to `<prefix>_read`, to avoid duplicate names

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"an MCP server needs either a command or a url; got {self}")


class MCPToolGroup(ToolGroup):
    """The tools of one server."""

    def __init__(self, name: str, server: MCPServerConfig, *, shows_images: bool = False) -> None:
        """Start a session. With `shows_images`, results contain their images. Otherwise, "[image]" replaces each.

        Raises:
            ToolFailure: the server cannot be reached, or does not speak the protocol.
            ModuleNotFoundError: the package mcp is not installed.
        """
        super().__init__(name)
        require("mcp", "mcp", "tools of MCP servers")
        self._shows_images = shows_images
        self._session = ExitStack()
        self._is_open = True
        try:
            with ExitStack() as stack:
                self._portal = stack.enter_context(_portals())
                self._client = stack.enter_context(_session(self._portal, name, server))
                self._schemas = self._portal.call(_schemas, self._client)
                self._session = stack.pop_all()
        except Exception as error:
            raise ToolFailure(f"the MCP server {name} ({server.command or server.url}): {_reason(error)}") from error

    def get_tool_names(self) -> list[str]:
        return sorted(self._schemas)

    def get_tool(self, name: str) -> Any:
        """Return a function that takes the tool's arguments by name, or None if there is no such tool."""
        return (lambda **arguments: self.call(name, arguments)) if name in self._schemas else None

    def get_schemas(self) -> list[dict[str, Any]]:
        return [self._schemas[name] for name in self.get_tool_names()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call the tool `name`, and return its result for the model.

        Text arguments are converted to the types of the tool's schema.

        Raises:
            ToolCallError: there is no such tool, or the server reports an error. The message is for the model.
            ToolFailure: the server does not answer, or the session is closed.
        """
        from mcp.types import INVALID_PARAMS

        if not self._is_open:
            raise ToolFailure(f"the session with the MCP server {self._name} is closed")
        if name not in self._schemas:
            raise ToolCallError(f"There is no tool {name!r}. Tools: {', '.join(self.get_tool_names()) or 'none'}.")
        converted = convert_arguments(arguments, self._schemas[name]["function"]["parameters"])
        try:
            result = self._portal.call(self._client.call_tool, name, converted)
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:  # some servers reject arguments this way
                raise ToolCallError(f"The arguments of {name} are wrong: {error}") from error
            raise ToolFailure(f"the MCP server {self._name}, tool {name}: {_reason(error)}") from error
        if result.is_error:
            raise ToolCallError(str(_format_result(result, shows_images=False)) or f"{name} failed")
        return _format_result(result, self._shows_images)

    def close(self) -> None:
        """End the session, and the server process if the session started it."""
        self._is_open = False
        self._session.close()


@cache
def _portals() -> BlockingPortalProvider:
    """Return the provider of the thread that runs all sessions of this process."""
    from anyio.from_thread import BlockingPortalProvider

    return BlockingPortalProvider()


@contextmanager
def _session(portal: BlockingPortal, name: str, server: MCPServerConfig) -> Iterator[Client]:
    """Run a session in a separate task: anyio requires the same task to enter and exit it."""
    import anyio

    opened: Future[Client] = Future()
    is_done = portal.call(anyio.Event)
    task = portal.start_task_soon(_run_session, server, opened, is_done)
    try:
        client = opened.result()
    except BaseException:  # the session failed, or we were interrupted and the task would keep running
        task.cancel()
        wait([task])
        raise
    try:
        yield client
    finally:
        portal.call(is_done.set)
        wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:  # its resources are released
            logger.debug("the session with the MCP server %s ended with an error", name, exc_info=error)


async def _run_session(server: MCPServerConfig, opened: Future[Client], is_done: Event) -> None:
    try:
        async with _client(server) as client:
            opened.set_result(client)
            await is_done.wait()
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
        raise


def _client(server: MCPServerConfig) -> Client:
    """Return the connection as an asynchronous context manager."""
    from mcp import Client, StdioServerParameters, stdio_client

    if server.url is not None:
        return Client(server.url, read_timeout_seconds=server.timeout)
    assert server.command is not None
    parameters = StdioServerParameters(command=server.command, args=server.args, env=server.env or None)
    return Client(stdio_client(parameters), read_timeout_seconds=server.timeout)


async def _schemas(client: Client) -> dict[str, dict[str, Any]]:
    """Return the schemas of the server's tools by name, in the format of `ToolGroup.get_schemas`."""
    schemas: dict[str, dict[str, Any]] = {}
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schemas[tool.name] = {"type": "function", "function": function}
        cursor = page.next_cursor
        if not cursor:
            return schemas


def _format_result(result: Any, shows_images: bool) -> Content:
    """Format a result for the model: its parts, and its structured content unless a text repeats it."""
    contents = [_format_part(part, shows_images) for part in result.content]
    texts = [content for content in contents if isinstance(content, str)]
    structured = result.structured_content
    if structured is None or (contents and not structured):
        return join_contents(contents)
    values = [_parse_if_json(text) for text in texts]
    inner = structured.get("result", structured)  # servers wrap results that are not objects
    is_repeated = values == inner or any(value in (structured, inner) for value in (*values, *texts))
    return join_contents(contents if is_repeated else [*contents, json.dumps(structured, ensure_ascii=False)])


def _parse_if_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _format_part(part: Any, shows_images: bool) -> Content:
    if part.type == "image" and shows_images:
        return [{"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"}]
    text = getattr(getattr(part, "resource", part), "text", None)  # an embedded file has its text in its resource
    return text if isinstance(text, str) else f"[{part.type}]"


def _reason(error: BaseException) -> str:
    """Format the first error in a task group's exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
