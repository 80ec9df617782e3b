"""Clients: their settings, and their sessions from the beginning to the end."""

from __future__ import annotations

import uuid
from functools import partial

from fastapi import APIRouter, Response
from sqlmodel import Session

from tx.tinker import store
from tx.tinker.catalog import list_sessions, search_sessions, session_info
from tx.tinker.checkpoint_files import delete_folder, snapshots_folder
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.db_models import SessionStatus, now
from tx.tinker.refusal import Refusal
from tx.tinker.replies import reply
from tx.tinker.routes.paging import Limit, Offset
from tx.tinker.service import Caller
from tx.tinker.wire import listings
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as answers

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    """Whether the server is up; it needs no key."""
    return reply(answers.Healthy())


@router.post("/client/config")
async def client_config(call: Caller) -> Response:
    """What clients are to do."""
    return reply(answers.ClientConfig(proto_compress_fwdbwd=call.service.config.compress_passes))


@router.post("/client/dynamic_config")
async def client_dynamic_config(call: Caller) -> Response:
    """The same, again and again."""
    return reply(answers.DynamicConfig())


@router.post("/telemetry")
async def telemetry(call: Caller, asked: wire.TelemetryRequest) -> Response:
    """Nothing of it is kept."""
    return reply(answers.Accepted())


@router.get("/get_server_capabilities")
async def get_server_capabilities(call: Caller) -> Response:
    """What is served; how long a context is known once the engine is up."""
    state = await call.service.read(call.service.engine_state)
    name = call.service.config.model_name
    model = answers.SupportedModel(model_name=name, max_context_length=None if state is None else state.max_context)
    return reply(answers.Capabilities(supported_models=[model]))


@router.post("/create_session")
async def create_session(call: Caller, asked: wire.CreateSessionRequest) -> Response:
    """A new one."""
    session_id = str(uuid.uuid4())
    call.note(session=session_id)

    def create(db: Session, owner: str) -> None:
        db.add(ClientSession(session_id=session_id, owner=owner, **asked.model_dump()))

    await call.write(create)
    return reply(answers.SessionCreated(session_id=session_id, warning_message=call.service.failure))


@router.post("/session_heartbeat")
async def session_heartbeat(call: Caller, asked: wire.SessionHeartbeatRequest) -> Response:
    """The client is still there; 410 tells it that its session is not."""
    call.note(session=asked.session_id)

    def hear(db: Session, owner: str) -> None:
        session = store.find_session(db, asked.session_id, owner)
        if session.status is not SessionStatus.ACTIVE:
            raise Refusal(410, f"session {asked.session_id} is {session.status}")
        session.last_seen_at = now()

    await call.write(hear)
    return reply(answers.Empty())


@router.post("/sessions/search")
async def search(call: Caller, asked: listings.SearchSessionsRequest) -> Response:
    """Sessions, the newest first."""
    return reply(await call.read(lambda db, owner: search_sessions(db, owner, asked)))


@router.post("/sessions/{session_id}/finish")
async def finish_session(call: Caller, session_id: str, asked: wire.FinishSessionRequest) -> Response:
    """The client is done: its models are unloaded. The first reason stays."""
    call.note(session=session_id)

    def finish(db: Session, owner: str) -> None:
        session = store.find_session(db, session_id, owner)
        if session.status is SessionStatus.ACTIVE:
            reason = asked.reason.type + (f": {asked.detail}" if asked.detail else "")
            store.end_session(db, session, SessionStatus.FINISHED, reason)

    await call.write(finish)
    call.service.ring()
    call.service.promises.ring()
    await call.service.compute(partial(delete_folder, snapshots_folder(call.service.config, session_id)))
    return reply(answers.Empty())


@router.put("/sessions/{session_id}/project")
async def assign_project(call: Caller, session_id: str, asked: wire.AssignProjectRequest) -> Response:
    """Into a project, which is a word and nothing more."""

    def assign(db: Session, owner: str) -> None:
        store.find_session(db, session_id, owner).project_id = asked.project_id

    await call.write(assign)
    return reply(answers.Empty())


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(call: Caller, session_id: str) -> Response:
    """Never made here."""
    await call.read(lambda db, owner: store.find_session(db, session_id, owner))
    return reply(answers.TraceExport(error="this server records no traces; see /metrics and its log"))


@router.get("/sessions/{session_id}")
async def get_session(call: Caller, session_id: str) -> Response:
    """What belongs to it."""
    return reply(await call.read(lambda db, owner: session_info(db, store.find_session(db, session_id, owner))))


@router.get("/sessions")
async def get_sessions(call: Caller, limit: Limit = 20, offset: Offset = 0) -> Response:
    """The newest first."""
    return reply(await call.read(lambda db, owner: list_sessions(db, owner, limit=limit, offset=offset)))
