"""Log each HTTP request in one line and record its metrics."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tx.tinker.refusal import RefusalError
from tx.tinker.server.downloads import hide_token
from tx.tinker.server.metrics import ServerMetrics
from tx.tinker.server.replies import refusal_reply

logger = logging.getLogger(__name__)

LOGGED_NOTES = ("session", "model", "request")
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
"""Methods with their own metrics. Clients can send any string as a method."""


STOPPING = RefusalError(503, "the server is stopping; retry in 10 s", retry_after=10)


class RequestLog:
    """ASGI middleware that logs each request with the notes from `Call.add_notes`.

    uvicorn cancels open requests a few seconds after a stop signal. Those without a response so far get a 503.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status, has_started = 500, False

        async def watch(message: Message) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
            await send(message)

        scope["tx.notes"] = {}
        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            if has_started:
                raise
            await refusal_reply(STOPPING)(scope, receive, watch)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        endpoint = getattr(scope.get("route"), "path", "other")  # label by route, because paths are unbounded
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.http_requests.labels(endpoint, method, status).inc()
        self._metrics.http_seconds.labels(endpoint).observe(seconds)
        notes = scope["tx.notes"]
        notes_text = " ".join(f"{name}={_escape(notes[name])}" for name in LOGGED_NOTES if name in notes)
        is_noise = status < 400 and endpoint.endswith(("heartbeat", "healthz", "telemetry"))
        level = logging.DEBUG if is_noise else logging.INFO
        path = _escape(hide_token(scope["path"]))
        logger.log(level, "%s %s %d %.1f ms %s", method, path, status, seconds * 1000, notes_text)


def _escape(notes_text: str) -> str:
    """Escape and truncate a client's text, so that it cannot inject or flood log lines."""
    return notes_text[:200].encode("unicode_escape").decode()
