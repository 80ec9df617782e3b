"""One line in the log for each request, and its numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tx.tinker.metrics import Metrics

logger = logging.getLogger("tx.tinker.http")

NOTED = ("session", "model", "request")
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
"""Of which there are numbers: clients may make up others without end."""


class RequestLog:
    """ASGI middleware; routes leave what they know in the scope, see `Call.note`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["tx.notes"] = {}
        try:
            await self._app(scope, receive, watch)
        finally:
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        endpoint = getattr(scope.get("route"), "path", "other")  # never the path itself, of which there is no end
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.http_requests.labels(endpoint, method, status).inc()
        self._metrics.http_seconds.labels(endpoint).observe(seconds)
        notes = scope["tx.notes"]
        told = " ".join(f"{name}={_in_a_line(notes[name])}" for name in NOTED if name in notes)
        is_noise = status < 400 and endpoint.endswith(("heartbeat", "healthz", "telemetry"))
        level = logging.DEBUG if is_noise else logging.INFO
        path = _in_a_line(scope["path"])
        logger.log(level, "%s %s %d %.1f ms %s", method, path, status, seconds * 1000, told)


def _in_a_line(told: str) -> str:
    """A client's words, which can neither end a line of the log nor fill it."""
    return told[:200].encode("unicode_escape").decode()
