"""A stand-in for a vLLM server, which responds immediately. `tests/vllm_server` tests a real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHOICE = {
    "index": 0,
    "token_ids": [3],
    "finish_reason": "length",
    "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{}]},
}


HOLD_SEC = 10


class _Answers(BaseHTTPRequestHandler):
    """Samples the token 3; refuses the prompt 13; answers the prompt 14 after the next other one."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path, body))  # type: ignore[attr-defined]
        if body.get("prompt") == [14]:
            self.server.is_other_answered.wait(HOLD_SEC)  # type: ignore[attr-defined]
        if body.get("prompt") == [13]:
            self._answer(400, {"error": {"message": "Requested sample logprobs of 32"}})
        else:
            self._answer(200, {"choices": [{**CHOICE, "index": i} for i in range(body.get("n", 0))]})
            self.server.is_other_answered.set()  # type: ignore[attr-defined]

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering_server() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Run a server; yield its address, and the paths and bodies that it receives."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.received = []  # type: ignore[attr-defined]
        server.is_other_answered = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", server.received  # type: ignore[attr-defined]
        finally:
            server.shutdown()
