"""The HTTP server in front of the engine under training: OpenAI's interface, in the trainer's own event loop.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health

The same below `/session/<id>`: what is asked there is recorded, until the session ends.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Coroutine, Generator
from contextlib import closing, contextmanager
from secrets import token_hex
from typing import Any, TypeVar

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import Receive

from skyrl_train.errors import ConfigError
from skyrl_train.generators.endpoint.asgi import Calls, EventStream, JSONAnswer, handle_errors
from skyrl_train.generators.endpoint.responses import Json
from skyrl_train.generators.endpoint.service import Job, ModelService
from skyrl_train.generators.endpoint.session import Owners, Session
from skyrl_train.generators.endpoint.wire import (
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    refuse,
    unavailable,
    unknown_session,
)
from skyrl_train.inference_engines.base import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 10.0
SHUTDOWN_S = 5  # for connections to close by themselves
KEEP_ALIVE_S = 600  # while the trainer updates the model, nothing is heard here; clients keep their connections


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
        await self._calls.end(unknown_session(session.id), lambda owners: session in owners)
        for cache in session.caches:
            await self._service.engine.end_session(cache)

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
        (session,) = self._sessions_of(asked, request, 1)
        return await self._respond(self._service.chat_job(asked, session), request)

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Answer a text completion."""
        sessions = self._sessions_of(asked, request, len(asked.prompts))
        return await self._respond(self._service.completion_job(asked, sessions), request)

    def models(self) -> Json:
        """The one model there is."""
        of_model = {"id": self._service.model_name, "max_model_len": self._service.engine.info.context_length}
        return {"object": "list", "data": [{"object": "model", "created": 0, "owned_by": "skyrl", **of_model}]}

    def check_health(self) -> None:
        """RequestError while it is shutting down."""
        if self._is_closing:
            raise unavailable("the endpoint is shutting down")

    def check_session(self, request: Request) -> None:
        """RequestError if the URL names a session that is not open."""
        session_id = request.path_params.get("session_id")
        if session_id is not None and session_id not in self._sessions:
            raise unknown_session(session_id)

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

    async def _respond(self, job: Job, request: Request) -> Response:
        if job.asked.stream:
            return EventStream(lambda receive, work: self._run(job.owners, receive, work), self._service.stream(job))
        return JSONAnswer(await self._run(job.owners, request.receive, self._service.answer(job)))

    async def _run(self, owners: Owners, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Do the work of a request when it may begin, as long as its client and its sessions are there."""
        with closing(work):  # it may never begin
            return await self._calls.run(owners, receive, self._begin(owners, work))

    async def _begin(self, owners: Owners, work: Coroutine[Any, Any, T]) -> T:
        for session in owners:
            if session is None:
                await self._serves_others.wait()
            elif session.id not in self._sessions:
                raise unknown_session(session.id)
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
    handle_errors(app)
    return app


class _Server(uvicorn.Server):
    """Signals are the trainer's."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
