"""Client settings and the life cycle of sessions."""

import uuid
from functools import partial

from fastapi import APIRouter, Response
from sqlmodel import Session

from tx.tinker.db_models import ClientSession, SessionStatus, now
from tx.tinker.refusal import RefusalError
from tx.tinker.server.replies import reply
from tx.tinker.server.service import Caller, Limit, Offset
from tx.tinker.store import queries
from tx.tinker.store.catalog import list_sessions, search_sessions, session_info
from tx.tinker.store.checkpoint_files import delete_folder, snapshots_folder
from tx.tinker.wire import listings
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as responses

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    """Report that the server is up. Needs no key."""
    return reply(responses.Health())


@router.post("/client/config")
async def client_config(call: Caller) -> Response:
    """Return the settings of clients."""
    return reply(responses.ClientConfig(proto_compress_fwdbwd=call.service.config.compress_passes))


@router.post("/client/dynamic_config")
async def client_dynamic_config(call: Caller) -> Response:
    """Return the settings that clients refresh."""
    return reply(responses.DynamicConfig())


@router.post("/telemetry")
async def telemetry(call: Caller, body: wire.TelemetryRequest) -> Response:
    """Accept telemetry and discard it."""
    return reply(responses.TelemetryAccepted())


@router.get("/get_server_capabilities")
async def get_server_capabilities(call: Caller) -> Response:
    """Describe the served model. Its context length is known once the engine is up."""
    state = await call.service.read(call.service.engine_state)
    name = call.service.config.model_name
    model = responses.SupportedModel(model_name=name, max_context_length=None if state is None else state.max_context)
    return reply(responses.Capabilities(supported_models=[model]))


@router.post("/create_session")
async def create_session(call: Caller, body: wire.CreateSessionRequest) -> Response:
    """Create a session."""
    session_id = str(uuid.uuid4())
    call.add_notes(session=session_id)

    def create(db: Session, owner: str) -> None:
        session = ClientSession(session_id=session_id, owner=owner, **body.model_dump())
        queries.create_session(db, session, call.service.config.max_sessions_per_user)

    await call.write(create)
    return reply(responses.SessionCreated(session_id=session_id, warning_message=call.service.failure))


@router.post("/session_heartbeat")
async def session_heartbeat(call: Caller, body: wire.SessionHeartbeatRequest) -> Response:
    """Record that the client is alive. Answer 404 if its session does not exist, and 410 if it has ended."""
    call.add_notes(session=body.session_id)

    def hear(db: Session, owner: str) -> None:
        session = queries.find_session(db, body.session_id, owner)
        if session.status is not SessionStatus.ACTIVE:
            raise RefusalError(410, f"session {body.session_id} is {session.status}; create a new one")
        session.last_seen_at = now()

    await call.write(hear)
    return reply(responses.Empty())


@router.post("/sessions/search")
async def search(call: Caller, body: listings.SearchSessionsRequest) -> Response:
    """Search sessions, newest first."""
    return reply(await call.read(lambda db, owner: search_sessions(db, owner, body)))


@router.post("/sessions/{session_id}/finish")
async def finish_session(call: Caller, session_id: str, body: wire.FinishSessionRequest) -> Response:
    """End a session and unload its models. A repeated call keeps the first reason."""
    call.add_notes(session=session_id)

    def finish(db: Session, owner: str) -> None:
        session = queries.find_session(db, session_id, owner)
        if session.status is SessionStatus.ACTIVE:
            reason = body.reason.type + (f": {body.detail}" if body.detail else "")
            queries.end_session(db, session, SessionStatus.FINISHED, reason)

    await call.write(finish)
    call.service.wake()
    call.service.promises.wake()
    await call.service.compute(partial(delete_folder, snapshots_folder(call.service.config, session_id)))
    return reply(responses.Empty())


@router.put("/sessions/{session_id}/project")
async def assign_project(call: Caller, session_id: str, body: wire.AssignProjectRequest) -> Response:
    """Assign a session to a project. A project is only a label."""

    def assign(db: Session, owner: str) -> None:
        queries.find_session(db, session_id, owner).project_id = body.project_id

    await call.write(assign)
    return reply(responses.Empty())


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(call: Caller, session_id: str) -> Response:
    """Report that trace exports are not supported."""
    await call.read(lambda db, owner: queries.find_session(db, session_id, owner))
    return reply(responses.TraceExport(error="this server records no traces; see /metrics and its log"))


@router.get("/sessions/{session_id}")
async def get_session(call: Caller, session_id: str) -> Response:
    """Describe a session."""
    return reply(await call.read(lambda db, owner: session_info(db, queries.find_session(db, session_id, owner))))


@router.get("/sessions")
async def get_sessions(call: Caller, limit: Limit = 20, offset: Offset = 0) -> Response:
    """List sessions, newest first."""
    return reply(await call.read(lambda db, owner: list_sessions(db, owner, limit=limit, offset=offset)))
