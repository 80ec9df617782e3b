from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def clear_game_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the user's GAME_TYPES."""
    monkeypatch.delenv("GAME_TYPES", raising=False)


@dataclass
class ModelServer:
    """An HTTP server of chat completions: `answer` maps messages to a reply, or to a status and a body."""

    answer: Callable[[list[dict[str, Any]]], str | tuple[int, bytes]] = lambda messages: "a1"
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    clients: set[Any] = field(default_factory=set)
    url: str = ""

    def handle(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        request = json.loads(body)
        self.requests.append({"path": path, "headers": headers, "body": request})
        reply = self.answer(request["messages"])
        if isinstance(reply, tuple):
            return reply
        message = {"role": "assistant", "content": reply}
        return 200, json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    """Run a server on a free local port during the test."""
    model = ModelServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            model.clients.add(self.client_address)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, reply = model.handle(self.path, dict(self.headers), body)
            self.send_response(status)
            for name, value in model.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply)))
            with contextlib.suppress(ConnectionError):  # the client may have given up
                self.end_headers()
                self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    model.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield model
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)
    assert not thread.is_alive()
