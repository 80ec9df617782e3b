"""What goes over the wire besides OpenAI's JSON: streams of events, errors, and clients that leave."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from skyrl_train.generators.endpoint.calls import ClientGone
from skyrl_train.generators.endpoint.errors import RequestError
from skyrl_train.generators.endpoint.responses import Json

CLIENT_CLOSED_REQUEST = 499


class JSONAnswer(Response):
    """JSON in ASCII: text of any kind survives, half of a surrogate pair too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See `Response.render`."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class EventStream(Response):
    """Chunks as server-sent events; what goes wrong on the way is the last of them."""

    media_type = "text/event-stream"

    def __init__(
        self, run: Callable[[Receive, Coroutine[Any, Any, None]], Awaitable[None]], chunks: AsyncGenerator[Json]
    ) -> None:
        """`run` awaits the sending of `chunks`; ClientGone or RequestError if that comes to an early end."""
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._run = run
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, as long as there is somebody to read it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._run(receive, self._send_chunks(send))
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


async def client_gone(receive: Receive) -> None:
    """Return when the client of a request, whose body has been read, goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def tell_errors(app: FastAPI) -> None:
    """Make every error of `app` an answer in OpenAI's shape."""

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return JSONAnswer(error.body(), status_code=error.status)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        is_json = first["type"] != "json_invalid"  # otherwise the place is a position in the text
        where = [str(part) for part in first["loc"][1:] if is_json]
        message = f"{'.'.join(where) or 'body'}: {first['msg']}"
        return await request_error(request, RequestError(400, message, param=where[0] if where else None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}"
        message = f"invalid URL ({what})" if error.status_code in (404, 405) else f"{error.detail} ({what})"
        return await request_error(request, RequestError(error.status_code, message))

    @app.exception_handler(ClientGone)
    async def nobody(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> Response:
        message = f"the endpoint failed: {type(error).__name__}: {error}"
        return await request_error(request, RequestError(500, message))
