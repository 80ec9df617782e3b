"""The HTTP server in front of the engine under training: OpenAI's interface, in the trainer's own event loop.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health

The same below `/session/<id>`: what is asked there is recorded, until the session ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, closing, contextmanager
from secrets import token_hex
from typing import Any, TypeVar

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from skyrl_train.errors import ConfigError
from skyrl_train.generators.endpoint.calls import Calls, ClientGone, Owners
from skyrl_train.generators.endpoint.errors import RequestError, refuse, unavailable
from skyrl_train.generators.endpoint.responses import Json
from skyrl_train.generators.endpoint.service import Job, ModelService
from skyrl_train.generators.endpoint.session import Session
from skyrl_train.generators.endpoint.wire import ChatRequest, CompletionOptions, CompletionRequest
from skyrl_train.inference_engines.base import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 10.0
SHUTDOWN_S = 5  # for connections to close by themselves
KEEP_ALIVE_S = 600  # while the trainer updates the model, nothing is heard here; clients keep their connections

CLIENT_CLOSED_REQUEST = 499


class JSONAnswer(Response):
    """JSON in ASCII: text of any kind survives, half of a surrogate pair too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See `Response.render`."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Endpoint:
    """The server: sessions, and what is being answered."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._sessions: dict[str, Session] = {}
        self._calls = Calls()
        self._serves_others = asyncio.Event()  # requests without a session
        self._serves_others.set()
        self._is_closing = False
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._origin = ""

    # -- life

    async def start(self, host: str = "127.0.0.1", port: int = 0, public_url: str | None = None) -> None:
        """Listen; port 0 takes a free one. `public_url` is how agents elsewhere reach this server.

        Raises:
            ConfigError: nothing can listen there.
        """
        try:
            listening = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise ConfigError(f"the endpoint cannot listen on {host}:{port} ({error}); try port 0") from error
        self._origin = (public_url or f"http://{host}:{listening.getsockname()[1]}").rstrip("/")
        config = uvicorn.Config(
            make_app(self),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.001)
        logger.info("The endpoint of model %r listens on %s/v1", self._service.model_name, self._origin)

    async def close(self) -> None:
        """Answer what is in progress with status 503, and stop listening. No socket is left."""
        self._is_closing = True
        self._serves_others.set()
        await self._calls.end(unavailable("the endpoint is shutting down"))
        for session in list(self._sessions.values()):
            await self.end_session(session)
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await self._serving

    def url(self, session: Session | None = None) -> str:
        """The `base_url` for clients: a session's, or that of requests that are not recorded."""
        return f"{self._origin}/v1" if session is None else f"{self._origin}/session/{session.id}/v1"

    # -- sessions

    def open_session(self, sampling: SamplingParams, seed: int, name: str = "session") -> Session:
        """Record what is asked below the session's URL, sampled as `sampling` says. `name` is for people."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
        session = Session(f"{readable}-{token_hex(8)}", sampling, seed, self._service.new_recording())
        self._sessions[session.id] = session
        return session

    async def end_session(self, session: Session) -> None:
        """Requests of the session that are unfinished, or come later, get status 404; its recording is complete."""
        self._sessions.pop(session.id, None)
        await self._calls.end(_unknown_session(session.id), lambda owners: session.id in owners)
        for cache in session.caches:
            self._service.engine.end_session(cache)

    def serve_others(self) -> None:
        """Answer requests without a session; so it is in the beginning."""
        self._serves_others.set()

    async def hold_others(self) -> None:
        """Let requests without a session wait until `serve_others`, those in progress get status 503.

        Afterwards the engine is not used from here, so that its weights may change.
        """
        self._serves_others.clear()
        await self._calls.end(unavailable("the model is being trained; ask again"), lambda owners: None in owners)

    # -- requests

    async def chat(self, asked: ChatRequest, request: Request) -> Response:
        """Answer a chat completion."""
        sessions = self._sessions_of(asked, request, 1)
        return await self._respond(self._service.chat_job(asked, sessions[0]), sessions, request)

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Answer a text completion."""
        sessions = self._sessions_of(asked, request, len(asked.prompts))
        return await self._respond(self._service.completion_job(asked, sessions), sessions, request)

    def models(self) -> Json:
        """The one model there is."""
        model = {"id": self._service.model_name, "object": "model", "created": 0, "owned_by": "skyrl"}
        model["max_model_len"] = self._service.engine.context_length
        return {"object": "list", "data": [model]}

    def check_health(self) -> None:
        """RequestError while it is shutting down."""
        if self._is_closing:
            raise unavailable("the endpoint is shutting down")

    def check_session(self, request: Request) -> None:
        """RequestError if the URL names a session that is not open."""
        session_id = request.path_params.get("session_id")
        if session_id is not None and session_id not in self._sessions:
            raise _unknown_session(session_id)

    def _sessions_of(self, asked: CompletionOptions, request: Request, n_prompts: int) -> list[Session | None]:
        """The session of each prompt: of the URL, else of the header, else of the body.

        A header or a body may name one that was never opened here: then it is not recorded.
        """
        self.check_health()
        self.check_session(request)
        session_id = request.path_params.get("session_id") or request.headers.get("x-session-id")
        named = asked.session_id if session_id is None else session_id
        ids = named if isinstance(named, list) else [named] * n_prompts
        if len(ids) != n_prompts:
            refuse(f"{len(ids)} session ids for {n_prompts} prompts; send one for each", param="session_id")
        return [None if session_id is None else self._sessions.get(str(session_id)) for session_id in ids]

    async def _respond(self, job: Job, sessions: list[Session | None], request: Request) -> Response:
        owners = frozenset(None if session is None else session.id for session in sessions)
        if job.asked.stream:
            return _EventStream(lambda receive, work: self._run(owners, receive, work), self._service.stream(job))
        return JSONAnswer(await self._run(owners, request.receive, self._service.answer(job)))

    async def _run(self, owners: Owners, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Do the work of a request when it may begin, as long as its client and its sessions are there."""
        with closing(work):  # it may never begin
            return await self._calls.run(owners, _Client(receive), self._begin(owners, work))

    async def _begin(self, owners: Owners, work: Coroutine[Any, Any, T]) -> T:
        for session_id in owners:
            if session_id is None:
                await self._serves_others.wait()
            elif session_id not in self._sessions:
                raise _unknown_session(session_id)
        self.check_health()
        return await work


def make_app(endpoint: Endpoint) -> FastAPI:
    """The routes, and errors in OpenAI's shape."""
    app = FastAPI(title="SkyRL", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await endpoint.chat(asked, request)

    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await endpoint.complete(asked, request)

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        endpoint.check_session(request)
        return JSONAnswer(endpoint.models())

    @router.get("/health")
    async def health() -> Response:
        endpoint.check_health()
        return JSONAnswer({"status": "ok"})

    app.include_router(router)
    app.include_router(router, prefix="/session/{session_id}")
    app.add_exception_handler(RequestError, _tell_request_error)
    app.add_exception_handler(RequestValidationError, _tell_validation_error)
    app.add_exception_handler(HTTPException, _tell_http_error)
    app.add_exception_handler(ClientGone, _tell_nobody)
    app.add_exception_handler(Exception, _tell_failure)
    return app


class _Server(uvicorn.Server):
    """Signals are the trainer's."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Client:
    """The client of a request whose body has been read: what comes next is that it leaves."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def gone(self) -> None:
        """See `Client.gone`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class _EventStream(Response):
    """Chunks as server-sent events; what goes wrong on the way is the last of them."""

    media_type = "text/event-stream"

    def __init__(
        self, run: Callable[[Receive, Coroutine[Any, Any, None]], Awaitable[None]], chunks: AsyncGenerator[Json]
    ) -> None:
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


def _unknown_session(session_id: str) -> RequestError:
    message = f"there is no open session {session_id!r}: it has ended, or never began"
    return RequestError(404, message, code="session_not_found")


async def _tell_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONAnswer(error.body(), status_code=error.status)


async def _tell_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    message = f"{'.'.join(where) or 'body'}: {first['msg']}"
    return JSONAnswer(RequestError(400, message, param=where[0] if where else None).body(), status_code=400)


async def _tell_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = f"invalid URL ({what})" if error.status_code in (404, 405) else f"{error.detail} ({what})"
    return JSONAnswer(RequestError(error.status_code, message).body(), status_code=error.status_code)


async def _tell_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _tell_failure(request: Request, error: Exception) -> Response:
    failure = RequestError(500, f"the endpoint failed: {type(error).__name__}: {error}")
    return JSONAnswer(failure.body(), status_code=failure.status)
