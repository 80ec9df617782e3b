"""An HTTP server for the model under training, with OpenAI's and Anthropic's APIs. It runs in the caller's event loop.

    POST /v1/chat/completions   POST /v1/responses   POST /v1/messages                GET /v1/models   GET /health
    POST /v1/completions                             POST /v1/messages/count_tokens   GET /v1/models/<id>

Requests under `/session/<id>` are recorded until that session ends.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from secrets import token_hex
from typing import TypeVar

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import Receive

from skyrl_agent.endpoint.asgi import ANSWERED_ERRORS, ActiveRequests, EventStream, JSONAnswer, answer_error
from skyrl_agent.endpoint.completions import ChatRequest, CompletionRequest, Json
from skyrl_agent.endpoint.messages import MessagesRequest
from skyrl_agent.endpoint.responses import ResponsesRequest
from skyrl_agent.endpoint.service import ChatBody, Job, ModelService
from skyrl_agent.endpoint.session import AgentSession, Owners
from skyrl_agent.endpoint.wire import CompletionOptions, RequestError, refuse, unavailable, unknown_session
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 10.0
SHUTDOWN_S = 5  # grace period for open connections
EPOCH = "1970-01-01T00:00:00Z"  # creation time of the model, as its real one is unknown
KEEP_ALIVE_S = 600  # clients keep their connections while the trainer updates the model


class Endpoint:
    """The server, its sessions, and the requests in progress."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._sessions: dict[str, AgentSession] = {}
        self._active = ActiveRequests()
        self._serves_others = asyncio.Event()  # "others": requests without a session
        self._serves_others.set()
        self._is_closing = False
        self._server: _UvicornServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.origin = ""  # URL of the server, set by `start`

    # -- life

    async def start(self, host: str = "127.0.0.1", port: int = 0, public_url: str | None = None) -> str:
        """Start listening and return the server's URL. Raise ConfigError if the address cannot be used.

        Port 0 picks a free port. `public_url` is the address for agents on other machines.
        """
        try:
            listening = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise ConfigError(f"the endpoint cannot listen on {host}:{port} ({error}); try port 0") from error
        self.origin = (public_url or f"http://{host}:{listening.getsockname()[1]}").rstrip("/")
        app = FastAPI(openapi_url=None, redirect_slashes=False)
        for kind in ANSWERED_ERRORS:
            app.add_exception_handler(kind, answer_error)
        router = APIRouter()
        router.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        router.add_api_route("/v1/responses", self._respond_to, methods=["POST"])
        router.add_api_route("/v1/messages", self._message, methods=["POST"])
        router.add_api_route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"])
        router.add_api_route("/v1/completions", self._complete, methods=["POST"])
        router.add_api_route("/v1/models", self._models)
        router.add_api_route("/v1/models/{model:path}", self._models)
        router.add_api_route("/health", self._health)
        app.include_router(router)
        app.include_router(router, prefix="/session/{session_id}")
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        self._server = _UvicornServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.001)
        logger.info("The endpoint of model %r listens on %s/v1", self._service.model_name, self.origin)
        return self.origin

    async def close(self) -> None:
        """Answer requests in progress with status 503, end all sessions, and stop listening."""
        self._is_closing = True
        self._serves_others.set()
        await self._active.end(unavailable("the endpoint is shutting down"))
        for session in list(self._sessions.values()):
            await self.end_session(session)
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await self._serving

    def url(self, session: AgentSession | None = None) -> str:
        """Return the `base_url` for clients of a session. Without a session, requests are not recorded."""
        return session_url(self.origin, session)

    # -- sessions

    async def open_session(self, sampling: SamplingParams, seed: int, name: str = "session") -> AgentSession:
        """Start recording the requests under the session's URL. `name` makes the URL readable in logs."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
        session = AgentSession(f"{readable}-{token_hex(8)}", sampling, seed, self._service.new_recording())
        self._sessions[session.id] = session
        return session

    async def end_session(self, session: AgentSession) -> None:
        """Stop recording. Unfinished and later requests of the session get status 404."""
        self._sessions.pop(session.id, None)
        await self._active.end(unknown_session(session.id), lambda owners: session in owners)
        for cache in session.caches:
            await self._service.engine.end_session(cache)

    async def serve_others(self) -> None:
        """Answer requests without a session again. This is the initial state."""
        self._serves_others.set()

    async def hold_others(self) -> None:
        """Hold requests without a session until `serve_others`. Requests in progress get status 503.

        Between rollouts, the endpoint then leaves the engine idle, and its weights may change.
        """
        self._serves_others.clear()
        await self._active.end(unavailable("the model is being trained; retry"), lambda owners: None in owners)

    # -- routes

    async def _chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._reply(body, request)

    async def _respond_to(self, body: ResponsesRequest, request: Request) -> Response:
        return await self._reply(body, request)

    async def _message(self, body: MessagesRequest, request: Request) -> Response:
        return await self._reply(body, request)

    async def _reply(self, body: ChatBody, request: Request) -> Response:
        (session,) = self._sessions_of(body, request, 1)
        n_retries = request.headers.get("x-stainless-retry-count", "")  # of the clients of OpenAI and Anthropic
        is_retry = n_retries.isdecimal() and int(n_retries) > 0
        return await self._respond(self._service.chat_job(body, session, is_retry=is_retry), request)

    async def _count_tokens(self, body: MessagesRequest, request: Request) -> Response:
        (session,) = self._sessions_of(body, request, 1)
        _, prompt, _ = self._service.encode_chat(body, session)
        return JSONAnswer({"input_tokens": len(prompt.token_ids)})

    async def _complete(self, body: CompletionRequest, request: Request) -> Response:
        sessions = self._sessions_of(body, request, len(body.prompts))
        return await self._respond(self._service.completion_job(body, sessions), request)

    async def _models(self, request: Request, model: str | None = None) -> Response:
        """Describe the model, or the list of models, in the form of OpenAI's API and of Anthropic's."""
        self._check_session(request)
        id, length = self._service.model_name, self._service.engine.info.context_length
        if model not in (None, id):
            raise RequestError(404, f"there is no model {model!r} here; this is {id!r}")
        described: Json = {"object": "model", "created": 0, "owned_by": "skyrl", "id": id, "max_model_len": length}
        described |= {"type": "model", "display_name": id, "created_at": EPOCH, "max_input_tokens": length}
        listed = {"object": "list", "data": [described], "has_more": False, "first_id": id, "last_id": id}
        return JSONAnswer(listed if model is None else described)

    async def _health(self) -> Response:
        self._check_open()
        return JSONAnswer({"status": "ok"})

    def _check_open(self) -> None:
        if self._is_closing:
            raise unavailable("the endpoint is shutting down")

    def _check_session(self, request: Request) -> None:
        """Raise RequestError if the URL names a session that is not open."""
        session_id = request.path_params.get("session_id")
        if session_id is not None and session_id not in self._sessions:
            raise unknown_session(session_id)

    def _sessions_of(self, body: CompletionOptions, request: Request, n_prompts: int) -> list[AgentSession | None]:
        """Return the session of each prompt. The URL comes first, then headers and the API key, then the body.

        An unknown session in the URL is an error. A request that names it elsewhere is served but not recorded.
        """
        self._check_open()
        self._check_session(request)
        headers = request.headers
        key = headers.get("authorization", "").removeprefix("Bearer ")
        keys = (headers.get("x-session-id"), headers.get("x-api-key"), key)
        in_headers = next((key for key in keys if key in self._sessions), None)
        named = request.path_params.get("session_id") or in_headers or body.session_id
        ids = named if isinstance(named, list) else [named] * n_prompts
        if len(ids) != n_prompts:
            refuse(f"{len(ids)} session ids for {n_prompts} prompts; send one for each", param="session_id")
        return [None if session_id is None else self._sessions.get(str(session_id)) for session_id in ids]

    async def _respond(self, job: Job, request: Request) -> Response:
        if job.request.stream:
            return EventStream(partial(self._run, job.owners), self._service.stream(job), job.builder.fail)
        return JSONAnswer(await self._run(job.owners, request.receive, lambda: self._service.answer(job)))

    async def _run(self, owners: Owners, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` once requests of its sessions are served, and return its result."""

        async def run_when_served() -> T:
            for session in owners:
                if session is None:
                    await self._serves_others.wait()
                elif session.id not in self._sessions:
                    raise unknown_session(session.id)
            self._check_open()
            return await work()

        return await self._active.run(owners, receive, run_when_served())


def session_url(origin: str, session: AgentSession | None) -> str:
    """Return the `base_url` at an endpoint, with or without a session."""
    return f"{origin}/v1" if session is None else f"{origin}/session/{session.id}/v1"


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, because the trainer has its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
