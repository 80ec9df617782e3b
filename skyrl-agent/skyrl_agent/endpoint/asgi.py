"""ASGI parts of the endpoint: active requests, disconnects, event streams and error responses."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from skyrl_agent.endpoint.completions import Json
from skyrl_agent.endpoint.messages import error_body
from skyrl_agent.endpoint.session import Owners
from skyrl_agent.endpoint.wire import RequestError, invalid

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499


class ClientGone(Exception):
    """The client disconnected before it received an answer."""


class ActiveRequests:
    """Requests in progress, and the sessions that they belong to."""

    def __init__(self) -> None:
        self._owners: dict[asyncio.Task[Any], Owners] = {}
        self._reasons: dict[asyncio.Task[Any], RequestError] = {}

    async def run(self, owners: Owners, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`.

        Cancel it if the client disconnects (raise ClientGone) or `end` is called (raise the RequestError passed to it).
        """
        task = asyncio.create_task(work)
        disconnecting = asyncio.create_task(_wait_for_disconnect(receive))
        self._owners[task] = owners
        try:
            await asyncio.wait((task, disconnecting), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            raise self._reasons.get(task) or ClientGone
        finally:
            task.cancel()
            disconnecting.cancel()
            await asyncio.gather(task, disconnecting, return_exceptions=True)
            self._owners.pop(task)
            self._reasons.pop(task, None)

    async def end(self, reason: RequestError, is_ended: Callable[[Owners], bool] = lambda owners: True) -> None:
        """Cancel the requests whose owners match, answer them with `reason`, and wait until their work has stopped."""
        tasks = [task for task, owners in self._owners.items() if is_ended(owners)]
        for task in tasks:
            self._reasons[task] = reason
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class JSONAnswer(Response):
    """A JSON response in ASCII. It can represent any text, even lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class EventStream(Response):
    """Chunks as server-sent events. An error is the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        run: Callable[[Receive, Callable[[], Awaitable[None]]], Awaitable[None]],
        chunks: AsyncGenerator[Json | str],
        fail: Callable[[RequestError], Json],
    ) -> None:
        """Stream `chunks`. `run` awaits the function that sends them, and may raise ClientGone or RequestError.

        `fail` returns the event of an error.
        """
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._run = run
        self._chunks = chunks
        self._fail = fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks until the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._run(receive, lambda: self._send_chunks(send))
        except RequestError as error:
            await _send_event(send, self._fail(error))
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send) -> None:
        async with aclosing(self._chunks):
            async for chunk in self._chunks:
                await _send_event(send, chunk)


async def _send_event(send: Send, event: Json | str) -> None:
    name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
    data = event if isinstance(event, str) else json.dumps(event, allow_nan=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"{name}data: {data}\n\n".encode(), "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. Call this after reading the request body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request with the error body of OpenAI, or of Anthropic to its clients."""
    match error:
        case ClientGone():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case RequestError():
            refusal = error
        case RequestValidationError():
            first = error.errors()[0]
            refusal = invalid({**first, "loc": first["loc"][1:]})
        case HTTPException():
            reason = "invalid URL" if error.status_code in (404, 405) else error.detail
            refusal = RequestError(error.status_code, f"{reason} ({request.method} {request.url.path})")
        case _:
            refusal = RequestError(500, f"the endpoint failed: {type(error).__name__}: {error}")
    is_anthropic = "/v1/messages" in request.url.path or "anthropic-version" in request.headers
    return JSONAnswer(error_body(refusal) if is_anthropic else refusal.body(), status_code=refusal.status)


ANSWERED_ERRORS = (ClientGone, RequestError, RequestValidationError, HTTPException, Exception)
"""Exceptions that `answer_error` handles. Starlette logs and re-raises those that only `Exception` would cover."""
