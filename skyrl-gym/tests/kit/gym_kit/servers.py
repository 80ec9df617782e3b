import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_kit.http_server import Request, chat_completion, serving
from gym_kit.processes import free_port, wait_until

MCP_SERVER = str(Path(__file__).with_name("mcp_server.py"))


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
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    def handle(self, request: Request) -> tuple[int, Any]:
        reply = self.answer(request.body["messages"])
        return reply if isinstance(reply, tuple) else (200, chat_completion(reply))


@contextmanager
def run_model_server() -> Iterator[ModelServer]:
    model = ModelServer()
    with serving(model.handle, model.headers) as (address, model.requests):
        model.url = f"{address}/v1"
        yield model


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
