"""An S3 server, moto's, which runs in `.venv-s3` (`make test-s3`), behind a proxy that injects faults."""

import socket
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from train_kit.networks import Faults, FaultyProxy

SERVER = Path(__file__).parents[3] / ".venv-s3/bin/moto_server"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def server_port() -> Iterator[int]:
    """The port of a running server."""
    port = free_port()
    command = [str(SERVER), "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                assert process.poll() is None, "the S3 server ended"
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def faults(server_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The faults between S3 clients and the server; the credentials are set."""
    proxy = FaultyProxy(server_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")  # pragma: allowlist secret
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield proxy.faults
    proxy.close()


@pytest.fixture
def bucket(server_port: int, faults: Faults, request: pytest.FixtureRequest) -> str:
    """The URL of a new bucket."""
    name = "bucket-" + "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:40].strip("-")
    connection = HTTPConnection("127.0.0.1", server_port)
    connection.request(
        "PUT",
        f"/{name}",
        headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"},
    )
    assert connection.getresponse().status == 200
    return f"s3://{name}"
