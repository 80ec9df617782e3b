import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gym_kit.processes import free_port, wait_until

MCP_SERVER = str(Path(__file__).with_name("mcp_server.py"))


class Server(ThreadingHTTPServer):
    """A server that queues many connections. With the default, 5, the kernel resets some of 20 at once."""

    request_queue_size = 128


@contextmanager
def run_server(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block, which begins when the program listens on `port`."""

    def is_listening() -> bool:
        assert process.poll() is None, "the server has ended; its error output is above"
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False

    with subprocess.Popen(command) as process:
        try:
            wait_until(is_listening)
            yield process
        finally:
            process.kill()


@contextmanager
def run_mcp_server() -> Iterator[str]:
    """Run `mcp_server.py` over HTTP, and return its URL."""
    port = free_port()
    with run_server([sys.executable, MCP_SERVER, str(port)], port):
        yield f"http://127.0.0.1:{port}/mcp"


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


@contextmanager
def run_model_server() -> Iterator[ModelServer]:
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
            with suppress(ConnectionError):  # the client may have given up
                self.end_headers()
                self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    model.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
        assert not thread.is_alive()


@dataclass
class ScriptedServer:
    """A server that sends the given bytes as answers, one after the other, and repeats the last one forever."""

    url: str
    n_requests: int = 0


@contextmanager
def run_scripted_server(*answers: bytes) -> Iterator[ScriptedServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = ScriptedServer(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                answer = answers[min(server.n_requests, len(answers) - 1)]
                server.n_requests += 1
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
