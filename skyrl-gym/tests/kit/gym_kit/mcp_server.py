"""An MCP server that keeps notes per session: `mcp_server.py` serves over pipes, `mcp_server.py PORT` over HTTP."""

import base64
import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)
from pydantic import StrictFloat

RED_PIXEL = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x02\0\0\0\x90wS\xde"
    b"\0\0\0\x0cIDATx\x9cc\xf8\xcf\xc0\0\0\x03\x01\x01\0\xc9\xfe\x92\xef\0\0\0\0IEND\xaeB`\x82"
).decode()
"""A PNG file in base64."""

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add_note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def read_notes(joined_by: str = ", ") -> str:
    """Read all notes."""
    return joined_by.join(notes)


@server.tool()
def fail(reason: str) -> str:
    """Do not work."""
    raise ValueError(reason)


@server.tool()
def refuse(is_internal: bool = False) -> str:
    """Answer with an error of the protocol, and not of the tool."""
    raise MCPError(INTERNAL_ERROR if is_internal else INVALID_PARAMS, "not these")


@server.tool()
def attach() -> CallToolResult:
    """Answer with a file of text, and one that is none."""
    text = TextResourceContents(uri="file:///list.txt", text="milk and tea")
    blob = BlobResourceContents(uri="file:///list.png", blob="aGk=")
    return CallToolResult(content=[EmbeddedResource(type="resource", resource=file) for file in (text, blob)])


@server.tool()
def draw(text: str) -> CallToolResult:
    """Answer with a text and an image of one red pixel, in base64."""
    image = ImageContent(type="image", data=RED_PIXEL, mime_type="image/png")
    return CallToolResult(content=[TextContent(type="text", text=text), image], structured_content={"drawn": 1})


@server.tool()
def count() -> CallToolResult:
    """Answer with values alone."""
    return CallToolResult(content=[], structured_content={"n_notes": len(notes)})


@server.tool()
def list_projects() -> CallToolResult:
    """Answer with a sentence, and with values that it does not have."""
    text = TextContent(type="text", text="list_projects returned 2 items.")
    return CallToolResult(content=[text], structured_content={"projects": [{"id": 1}, {"id": 2}]})


@server.tool()
def numbers() -> list[int]:
    """Answer with a list, which the library sends as texts and as values."""
    return [3, 5]


@server.tool()
def one_project() -> dict[str, int]:
    """Answer with an object, which the library sends as text and as values."""
    return {"id": 1}


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def wait(seconds: StrictFloat) -> str:
    """Wait. Like most servers, this refuses a number that is written as text."""
    time.sleep(seconds)
    return "done"


@server.tool()
def environment() -> str:
    """Show the environment variables that the server sees."""
    return " ".join(sorted(os.environ.values()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
