"""Queries for accepting and answering requests. All take a database session."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import ColumnElement, func, update
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from tx.tinker.config import TxConfig, unnamed_user
from tx.tinker.db_models import (
    Checkpoint,
    ClientSession,
    EngineState,
    Kind,
    Model,
    ModelStatus,
    RequestStatus,
    SamplingSession,
    SessionStatus,
    TxRequest,
    now,
)
from tx.tinker.refusal import RefusalError, not_found, refuse
from tx.tinker.store.checkpoint_files import checkpoint_folder, parse_path, set_aside

ACCEPTING = (ModelStatus.PENDING, ModelStatus.READY)
"""Statuses of models that accept requests."""
RECENT = timedelta(seconds=2)
SEEN_INTERVAL = timedelta(seconds=2)
"""Minimum time between two updates of a session's `last_seen_at` by requests. Heartbeats always update it."""


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """Return a model's id. Clients construct the same id."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id_of(session_id: str, seq_id: int) -> str:
    """Return the id of a sampling session or snapshot. Both share one numbering per client session."""
    return f"{session_id}:sample:{seq_id}"


def hash_of(payload: bytes) -> str:
    """Hash a payload, to distinguish repeated requests from different ones."""
    return hashlib.sha256(payload).hexdigest()


# -- find


def _key(key: str) -> str:
    """Return a usable key. Raise `RefusalError` 404 for a NUL character, since PostgreSQL rejects it."""
    if "\0" in key:
        not_found(f"there is no {key[:100]!r}")
    return key


def find_session(db: Session, session_id: str, owner: str) -> ClientSession:
    """Return a session. Raise `RefusalError` 404 if it does not exist or belongs to a different user."""
    found = db.get(ClientSession, _key(session_id))
    if found is None or found.owner != owner:
        not_found(f"there is no session {session_id!r}; create it with create_session")
    return found


def active_session(db: Session, session_id: str, owner: str) -> ClientSession:
    """Return an active session and record that it was seen. Raise `RefusalError` 400 if it has ended."""
    session = find_session(db, session_id, owner)
    if session.status is not SessionStatus.ACTIVE:
        refuse(f"session {session_id} is {session.status}; create a new one")
    touch(session)
    return session


def touch(session: ClientSession) -> None:
    """Record that a session was seen, at most once per `SEEN_INTERVAL`."""
    if abs(now() - session.last_seen_at) > SEEN_INTERVAL:  # negative if the clock was set back
        session.last_seen_at = now()


def create_session(db: Session, session: ClientSession, max_sessions: int) -> None:
    """Add a session. Raise `RefusalError` 400 if its user has too many active sessions."""
    of_user = (ClientSession.owner == session.owner, ClientSession.status == SessionStatus.ACTIVE)
    n_sessions = db.exec(select(func.count()).select_from(ClientSession).where(*of_user)).one()
    if n_sessions >= max_sessions:
        refuse(
            f"you have {n_sessions} active sessions, which is the limit per user, --max-sessions-per-user; "
            "close a client, or wait until the sessions of dead clients expire"
        )
    db.add(session)


def name_users(db: Session, users_by_key: Mapping[str, str]) -> None:
    """Assign to named users the sessions and requests that they created while their keys had no names."""
    for key, user in users_by_key.items():
        unnamed = unnamed_user(key)
        if user != unnamed:
            for table in (ClientSession, TxRequest):
                db.exec(update(table).where(col(table.owner) == unnamed).values(owner=user))


def find_model(db: Session, model_id: str, owner: str) -> Model:
    """Return a model in any status. Raise `RefusalError` 404 if there is none."""
    model = db.get(Model, _key(model_id))
    if model is None or not owns(db, model, owner):
        not_found(f"there is no model {model_id!r}; create it with create_model")
    return model


def owns(db: Session, model: Model, owner: str) -> bool:
    """Return True if the model belongs to this user."""
    session = db.get(ClientSession, model.session_id)
    return session is not None and session.owner == owner


def active_model(db: Session, model_id: str, owner: str) -> Model:
    """Return a model that accepts requests, and record that its session was seen."""
    model = find_model(db, model_id, owner)
    active_session(db, model.session_id, owner)
    if model.status in (ModelStatus.UNLOADING, ModelStatus.UNLOADED):
        refuse(f"model {model_id} was unloaded; load a checkpoint of it into a new one")
    if model.status is ModelStatus.FAILED:
        creation = (TxRequest.model_id == model_id, TxRequest.seq_id == 0)
        reason = db.exec(select(TxRequest.error).where(*creation)).first() or "see the server's log"
        refuse(f"model {model_id} could not be created: {reason}")
    model.last_request_at = now()
    return model


def find_sampling_session(db: Session, sampling_session_id: str, owner: str) -> SamplingSession:
    """Return a sampling session. Raise `RefusalError` 404 if there is none."""
    of_owner = select(SamplingSession).join(ClientSession).where(ClientSession.owner == owner)
    found = db.exec(of_owner.where(SamplingSession.sampling_session_id == _key(sampling_session_id))).first()
    if found is None:
        not_found(f"there is no sampling session {sampling_session_id!r}; create it with create_sampling_session")
    return found


def find_checkpoint(db: Session, path: str, owner: str) -> Checkpoint:
    """Return a checkpoint of the user, or a public one. Raise `RefusalError` 400 or 404 if there is none."""
    parts = parse_path(path)
    checkpoint = db.get(Checkpoint, (parts.model_id, parts.kind, parts.name))
    if checkpoint is None or not (checkpoint.is_public or _owns_checkpoint(db, checkpoint, owner)):
        not_found(f"there is no checkpoint {path}; training_runs/{parts.model_id}/checkpoints lists the existing ones")
    if checkpoint.expires_at is not None and checkpoint.expires_at <= now():
        not_found(f"checkpoint {path} expired at {checkpoint.expires_at:%Y-%m-%d %H:%M:%S} UTC")
    return checkpoint


def own_checkpoint(db: Session, path: str, owner: str) -> Checkpoint:
    """Return a checkpoint that a user may change."""
    checkpoint = find_checkpoint(db, path, owner)
    if not _owns_checkpoint(db, checkpoint, owner):
        not_found(f"checkpoint {path} is another user's")
    return checkpoint


def _owns_checkpoint(db: Session, checkpoint: Checkpoint, owner: str) -> bool:
    model = db.get(Model, checkpoint.model_id)
    return model is not None and owns(db, model, owner)


def engine_state(db: Session, base_model: str) -> EngineState | None:
    """Return the engine's last report, or None if no engine with this base model has been up yet."""
    state = db.get(EngineState, 1)
    return state if state is not None and state.base_model == base_model else None


# -- accept


def earlier_request(db: Session, request: TxRequest) -> TxRequest | None:
    """Return the request that this one repeats, or None. Raise `RefusalError` 400 if its number is already taken."""
    where, number = request.model_id, request.seq_id
    columns = (col(TxRequest.model_id), col(TxRequest.seq_id))
    if where is None:
        where, number = request.sampling_session_id, request.sample_seq_id
        columns = (col(TxRequest.sampling_session_id), col(TxRequest.sample_seq_id))
    if where is None or number is None:
        return None
    earlier = db.exec(select(TxRequest).where(columns[0] == where, columns[1] == number)).first()
    if earlier is not None and (earlier.payload_hash, earlier.kind) != (request.payload_hash, request.kind):
        refuse(f"seq_id={number} of {where} was used by another request, {earlier.kind}; increment it for each new one")
    return earlier


def has_requests(db: Session, model_id: str) -> bool:
    """Return True if a model has had requests since its creation, other than failed attempts to load weights."""
    others = select(TxRequest.request_id).where(
        TxRequest.model_id == model_id,
        col(TxRequest.seq_id).is_distinct_from(0),
        (col(TxRequest.kind) != Kind.LOAD_WEIGHTS) | (col(TxRequest.status) != RequestStatus.FAILED),
    )
    return db.exec(others.limit(1)).first() is not None


def n_models(db: Session, base_model: str, owner: str | None = None) -> int:
    """Count the models of a base model that occupy memory or will, for one user or for all."""
    living = (col(Model.status).in_(ACCEPTING), col(Model.base_model) == base_model)
    counted = select(func.count()).select_from(Model).where(*living)
    if owner is not None:
        counted = counted.join(ClientSession).where(ClientSession.owner == owner)
    return db.exec(counted).one()


def fail_waiting(db: Session, model: Model, reason: str) -> None:
    """Fail the pending requests of a model that could not be restored, except for unloading: it then succeeds."""
    waiting = (
        col(TxRequest.model_id) == model.model_id,
        col(TxRequest.status) == RequestStatus.PENDING,
        col(TxRequest.kind) != Kind.UNLOAD_MODEL,
    )
    error = f"model {model.model_id} could not be restored: {reason}"
    failed = {"status": RequestStatus.FAILED, "error": error, "error_category": "server", "completed_at": now()}
    db.exec(update(TxRequest).where(*waiting).values(failed))
    model.lost_because = None


def failed_passes(db: Session, step: TxRequest) -> Sequence[TxRequest]:
    """Return the failed passes of a step's model between the previous step and this one."""
    of_model = (col(TxRequest.model_id) == step.model_id, col(TxRequest.request_id) < step.request_id)
    previous = select(func.max(TxRequest.request_id)).where(*of_model, TxRequest.kind == Kind.OPTIM_STEP)
    is_failed = (TxRequest.kind == Kind.FORWARD_BACKWARD, TxRequest.status == RequestStatus.FAILED)
    is_later = col(TxRequest.request_id) > func.coalesce(previous.scalar_subquery(), 0)
    return db.exec(select(TxRequest).where(*of_model, *is_failed, is_later)).all()


def unload_request(db: Session, model_id: str) -> int | None:
    """Return the number of the request to unload a model, or None."""
    of_model = (col(TxRequest.model_id) == model_id, col(TxRequest.kind) == Kind.UNLOAD_MODEL)
    return db.exec(select(TxRequest.request_id).where(*of_model)).first()


def queue_unload(db: Session, model: Model, owner: str) -> None:
    """Queue a request to unload a model after its earlier requests, unless there is one."""
    if model.status not in ACCEPTING:
        return
    model.status = ModelStatus.UNLOADING
    payload = f'{{"model_id":"{model.model_id}"}}'.encode()
    db.add(
        TxRequest(
            kind=Kind.UNLOAD_MODEL,
            owner=owner,
            session_id=model.session_id,
            model_id=model.model_id,
            payload=payload,
            payload_hash=hash_of(payload),
        )
    )


def end_session(db: Session, session: ClientSession, status: SessionStatus, reason: str) -> None:
    """End a session and unload its models. Requests up to a model's last save still run, the rest is cancelled."""
    session.status, session.end_reason = status, reason
    _cancel(db, col(TxRequest.session_id) == session.session_id, col(TxRequest.kind) == Kind.SAMPLE)
    for model in db.exec(select(Model).where(Model.session_id == session.session_id)):
        of_model = col(TxRequest.model_id) == model.model_id
        _cancel(
            db, of_model, col(TxRequest.kind) != Kind.UNLOAD_MODEL, col(TxRequest.request_id) > _last_save(db, model)
        )
        queue_unload(db, model, session.owner)


def _last_save(db: Session, model: Model) -> int:
    """Return the last pending request of a model that saves a named checkpoint, or 0 if there is none."""
    saves = select(TxRequest).where(
        TxRequest.model_id == model.model_id,
        TxRequest.status == RequestStatus.PENDING,
        col(TxRequest.kind).in_((Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_EXTERNAL, Kind.SAVE_WEIGHTS_FOR_SAMPLER)),
    )
    for request in db.exec(saves.order_by(col(TxRequest.request_id).desc())):
        if json.loads(request.payload).get("path") is not None:  # a snapshot has no name
            return request.request_id or 0
    return 0


def _cancel(db: Session, *which: ColumnElement[bool]) -> None:
    waiting = (*which, col(TxRequest.status) == RequestStatus.PENDING)
    db.exec(update(TxRequest).where(*waiting).values(status=RequestStatus.CANCELLED, completed_at=now()))


# -- answer


REQUEST_ID = re.compile(r"[0-9]{1,18}", re.ASCII)


def request_number(request_id: str) -> int:
    """Parse the id that clients use. Raise `RefusalError` 404 if it is invalid."""
    if not REQUEST_ID.fullmatch(request_id):
        not_found(f"there is no request {request_id[:100]!r}")
    return int(request_id)


def find_request(db: Session, request_id: int, owner: str) -> TxRequest:
    """Return a request without its payload and result. Raise `RefusalError` 404 if there is none."""
    without_bodies = (defer(col(TxRequest.payload)), defer(col(TxRequest.result)))  # type: ignore[arg-type]
    request = db.get(TxRequest, request_id, options=without_bodies)
    if request is None or request.owner != owner:
        not_found(f"there is no request {request_id}; requests of ended sessions are deleted after a while")
    return request


def finished_request(db: Session, request_id: int) -> TxRequest | None:
    """Return a finished request without payload, or None if pending. Raise `RefusalError` 410 if it has no result."""
    request = db.get(TxRequest, request_id, options=[defer(col(TxRequest.payload))])  # type: ignore[arg-type]
    if request is None:
        not_found(f"there is no request {request_id}")
    if request.status is RequestStatus.PENDING:
        return None
    if request.status is RequestStatus.DONE and request.result is None:
        raise RefusalError(410, f"the result of request {request_id} was deleted because of its age")
    return request


def waiting_reason(db: Session, model_id: str | None, base_model: str) -> str | None:
    """Return why a model's requests wait although an engine with `base_model` runs, or None if they do not."""
    model = None if model_id is None else db.get(Model, model_id)
    if model is None:
        return None
    if model.base_model != base_model:
        return f"it waits until {model.base_model} is served again; this server has {base_model}"
    if model.lost_because is not None:
        return f"model {model_id} could not be restored, so it waits for the next start: {model.lost_because}"
    return None


def pending_ids(db: Session) -> set[int]:
    """Return the ids of all pending requests."""
    return set(db.exec(select(TxRequest.request_id).where(TxRequest.status == RequestStatus.PENDING)))  # type: ignore[arg-type]


def recent_ids(db: Session) -> set[int]:
    """Return the ids of requests that finished, failed or were cancelled in the last seconds."""
    done = col(TxRequest.completed_at) > now() - RECENT
    return set(db.exec(select(TxRequest.request_id).where(done)))  # type: ignore[arg-type]


def cancel_sample(db: Session, request_id: int) -> None:
    """Cancel a pending sample. Finished samples and other kinds of requests are unaffected."""
    _cancel(db, col(TxRequest.request_id) == request_id, col(TxRequest.kind) == Kind.SAMPLE)


# -- checkpoints


def drop_checkpoint(db: Session, checkpoint: Checkpoint, config: TxConfig) -> Path | None:
    """Delete a checkpoint's row and rename its folder away. Return the folder for `delete_aside`."""
    db.delete(checkpoint)
    db.flush()
    return set_aside(checkpoint_folder(config, checkpoint.path))


def expiry(ttl_seconds: int | None) -> datetime | None:
    """Return when a checkpoint expires, or None if never."""
    return None if ttl_seconds is None else now() + timedelta(seconds=ttl_seconds)
