"""ASGI parts of the endpoint: active requests, disconnects, event streams and error responses."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from skyrl_train.endpoint.responses import Json
from skyrl_train.endpoint.session import Owners
from skyrl_train.endpoint.wire import RequestError

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
        self, run: Callable[[Receive, Callable[[], Awaitable[None]]], Awaitable[None]], chunks: AsyncGenerator[Json]
    ) -> None:
        """Stream `chunks`. `run` awaits the function that sends them, and may raise ClientGone or RequestError."""
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._run = run
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks until the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._run(receive, lambda: self._send_chunks(send))
            await _send_event(send, "[DONE]")
        except RequestError as error:
            await _send_event(send, json.dumps(error.body()))
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send) -> None:
        async with aclosing(self._chunks):
            async for chunk in self._chunks:
                await _send_event(send, json.dumps(chunk, allow_nan=False, separators=(",", ":")))


async def _send_event(send: Send, event: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. Call this after reading the request body."""
    while (await receive())["type"] != "http.disconnect":
        pass


def handle_errors(app: FastAPI) -> None:
    """Answer every error of `app` with OpenAI's error body."""

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return JSONAnswer(error.body(), status_code=error.status)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        is_json = first["type"] != "json_invalid"  # otherwise the location is a position in the text
        where = [str(part) for part in first["loc"][1:] if is_json]
        message = f"{'.'.join(where) or 'body'}: {first['msg']}"
        return await request_error(request, RequestError(400, message, param=where[0] if where else None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        reason = "invalid URL" if error.status_code in (404, 405) else error.detail
        message = f"{reason} ({request.method} {request.url.path})"
        return await request_error(request, RequestError(error.status_code, message))

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> Response:
        message = f"the endpoint failed: {type(error).__name__}: {error}"
        return await request_error(request, RequestError(500, message))
