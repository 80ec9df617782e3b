"""HTTP servers in place of services on the Internet; the test chooses the answers."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    """A request that a server received, e.g. POST, /v1/x, {"authorization": "Bearer k"} and {"n": 1}."""

    method: str
    path: str
    headers: dict[str, str]
    """Values by lower-case names."""
    body: Any
    client: tuple[str, int]
    """The client's end of the connection."""


class Server(ThreadingHTTPServer):
    """A server that queues many connections. With the default, 5, the kernel resets some of 20 at once."""

    request_queue_size = 128


Answer = Callable[[Request], tuple[int, Any]]
"""Returns the status and the content of a response: bytes, text, or any JSON value."""


@contextmanager
def serving(answer: Answer, headers: Mapping[str, str] | None = None) -> Iterator[tuple[str, list[Request]]]:
    """Serve answers with further headers. Yield the address, e.g. `http://127.0.0.1:8080`, and the requests so far."""
    requests: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            received = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, received, body, self.client_address)
            requests.append(request)
            status, content = answer(request)
            is_json = not isinstance(content, bytes | str)
            text = json.dumps(content) if is_json else content
            data = text.encode() if isinstance(text, str) else text
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if is_json else "text/plain")
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # the client may have given up
                self.end_headers()
                self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chat_completion(text: str) -> dict[str, Any]:
    """Return a response of OpenAI's chat API with one reply."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
