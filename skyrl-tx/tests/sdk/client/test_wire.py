"""Record the traffic between the SDK and the server for the compatibility table."""

import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import tinker
from differences import KEY, client_of, close
from passes import Server
from tinker import types

NAMES = {"application/json": "JSON", "application/x-protobuf": "protobuf"}
HOP_BY_HOP = ("connection", "content-length", "host", "transfer-encoding")


class Exchange(NamedTuple):
    path: str
    sent: str
    encoding: str
    received: str


class Listener(BaseHTTPRequestHandler):
    """A proxy that records requests and replies."""

    protocol_version = "HTTP/1.1"
    netloc: str
    seen: list[Exchange]

    def do_GET(self) -> None:
        """Forward a request, with or without a body."""
        body = self._body()
        headers = {key: value for key, value in self.headers.items() if key.lower() not in HOP_BY_HOP}
        connection = http.client.HTTPConnection(self.netloc, timeout=60)
        connection.request(self.command, self.path, body, headers)
        reply = connection.getresponse()
        content = reply.read()
        kinds = [self.headers["Content-Type"] or "", reply.getheader("Content-Type") or ""]
        sent, received = (NAMES.get(kind, kind) for kind in kinds)
        self.seen.append(Exchange(self.path.rpartition("/")[2], sent, self.headers["Content-Encoding"] or "", received))
        self.send_response(reply.status)
        for key, value in reply.getheaders():
            if key.lower() not in HOP_BY_HOP:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        connection.close()

    do_POST = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log."""


@pytest.fixture
def listener(server: Server) -> Iterator[tuple[str, list[Exchange]]]:
    seen: list[Exchange] = []
    handler = type("Noting", (Listener,), {"netloc": urlsplit(server.url).netloc, "seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}", seen
        listening.shutdown()
        thread.join()


def test_wire(
    server: Server, listener: tuple[str, list[Exchange]], record_property: Callable[[str, object], None]
) -> None:
    """Passes and samples pass an HTTP/1.1 proxy."""
    url, seen = listener
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = client_of(service.create_lora_training_client(server.base_model, rank=4))

    def of(call: Callable[[], object]) -> tuple[Exchange, Exchange]:
        """Return a call's first request and its last poll."""
        n_seen = len(seen)
        call()
        mine = seen[n_seen:]
        sent = next(one for one in mine if one.path in ("forward", "forward_backward", "asample"))
        return sent, [one for one in mine if one.path == "retrieve_future"][-1]

    forward, forward_result = of(lambda: training.forward(server.data, "cross_entropy").result())
    backward, backward_result = of(lambda: training.forward_backward(server.data, "cross_entropy").result())
    sampler = client_of(service.create_sampling_client(base_model=server.base_model))
    params = types.SamplingParams(max_tokens=2)
    _, sample_result = of(lambda: sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params).result())
    record_property("`forward` is sent to", f"`{forward.path}`")
    label = "passes are sent as" + ", with `--compress-passes`" * server.is_compressing
    record_property(label, " + ".join(filter(None, (backward.sent, backward.encoding))))
    record_property("results of passes come as", backward_result.received)
    record_property("samples come as", sample_result.received)
    close(service)
    assert forward.sent == backward.sent
    assert forward_result.received == backward_result.received
