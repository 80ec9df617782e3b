"""A server of tools, `mcp_server.py` over its pipes and `mcp_server.py PORT` over HTTP: notes that a session keeps."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

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
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


@server.tool()
def environment() -> str:
    """What the server can see of its environment."""
    return " ".join(sorted(os.environ.values()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
