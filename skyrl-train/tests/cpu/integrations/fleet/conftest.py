from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

STAND_IN = Path(__file__).parents[2] / "fleet_stand_in"


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the stand-in for OpenEnv, and return its class."""
    forget_envs()
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("FLEET_API_KEY", "test")
    from envs.fleet_env.task_env import FleetTaskEnv

    FleetTaskEnv.faults = random.Random(0)
    yield FleetTaskEnv
    forget_envs()


def forget_envs() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]


class SlackServer(BaseHTTPRequestHandler):
    """A server with the interface of Slack's chat.postMessage."""

    received: list[tuple[str, dict[str, str]]] = []  # noqa: RUF012
    answer: dict[str, Any] = {}  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append((self.headers["Authorization"], body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def slack_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlackServer]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlackServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SLACK_API_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("SLACK_BOT_TOKEN", "secret-token")
    SlackServer.received, SlackServer.answer = [], {"ok": True, "ts": "12.5"}
    yield SlackServer
    server.shutdown()
    server.server_close()
