"""What the server asks of the database when it accepts requests, and when it answers them. All take a session of it."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import ColumnElement, func, update
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from tx.tinker.checkpoint_files import checkpoint_folder, parse_path, set_aside
from tx.tinker.config import TxConfig
from tx.tinker.database import open_database, reading, writing
from tx.tinker.db_models import (
    Checkpoint,
    EngineState,
    Kind,
    Model,
    ModelStatus,
    Request,
    RequestStatus,
    SamplingSession,
    SessionStatus,
    now,
)
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.refusal import Refusal, not_found, refuse

__all__ = ["open_database", "reading", "writing"]  # besides what is below, for those who import no other module

LIVING = (ModelStatus.PENDING, ModelStatus.READY)
"""Models that take requests."""
LATELY = timedelta(seconds=2)
SEEN_EVERY = timedelta(seconds=2)
"""How often it is written down that a session was heard of."""


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """As clients make it up, too."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id_of(session_id: str, seq_id: int) -> str:
    """Of the sampling sessions and the snapshots of a client, which share their numbers."""
    return f"{session_id}:sample:{seq_id}"


def hash_of(payload: bytes) -> str:
    """To tell a repeated request from another."""
    return hashlib.sha256(payload).hexdigest()


# -- what there is


def _key(told: str) -> str:
    """Of a row; `Refusal` 404 for what PostgreSQL would not even look for."""
    if "\0" in told:
        not_found(f"there is no {told[:100]!r}")
    return told


def find_session(db: Session, session_id: str, owner: str) -> ClientSession:
    """A client's session; `Refusal` 404 without one, or if it is another user's."""
    found = db.get(ClientSession, _key(session_id))
    if found is None or found.owner != owner:
        not_found(f"there is no session {session_id!r}; it comes from create_session")
    return found


def active_session(db: Session, session_id: str, owner: str) -> ClientSession:
    """The same, which has not ended; and it was heard of."""
    session = find_session(db, session_id, owner)
    if session.status is not SessionStatus.ACTIVE:
        refuse(f"session {session_id} is {session.status}; begin a new one")
    touch(session)
    return session


def touch(session: ClientSession) -> None:
    """It was heard of just now."""
    if now() - session.last_seen_at > SEEN_EVERY:
        session.last_seen_at = now()


def find_model(db: Session, model_id: str, owner: str) -> Model:
    """A model, whatever became of it; `Refusal` 404 without one."""
    model = db.get(Model, _key(model_id))
    if model is None or not owns(db, model, owner):
        not_found(f"there is no model {model_id!r}; it comes from create_model")
    return model


def owns(db: Session, model: Model, owner: str) -> bool:
    """Whether it is this user's."""
    session = db.get(ClientSession, model.session_id)
    return session is not None and session.owner == owner


def active_model(db: Session, model_id: str, owner: str) -> Model:
    """A model that takes requests; and its session was heard of."""
    model = find_model(db, model_id, owner)
    active_session(db, model.session_id, owner)
    if model.status in (ModelStatus.UNLOADING, ModelStatus.UNLOADED):
        refuse(f"model {model_id} was unloaded; load a checkpoint of it into a new one")
    if model.status is ModelStatus.FAILED:
        refuse(f"model {model_id} could not be created: {_why_failed(db, model_id)}")
    model.last_request_at = now()
    return model


def _why_failed(db: Session, model_id: str) -> str:
    found = db.exec(select(Request.error).where(Request.model_id == model_id, Request.seq_id == 0)).first()
    return found or "see the log of the server"


def find_sampling_session(db: Session, sampling_session_id: str, owner: str) -> SamplingSession:
    """A sampling session; `Refusal` 404 without one."""
    of_owner = select(SamplingSession).join(ClientSession).where(ClientSession.owner == owner)
    found = db.exec(of_owner.where(SamplingSession.sampling_session_id == _key(sampling_session_id))).first()
    if found is None:
        not_found(f"there is no sampling session {sampling_session_id!r}; it comes from create_sampling_session")
    return found


def find_checkpoint(db: Session, path: str, owner: str) -> Checkpoint:
    """A checkpoint that a user may read: an own one, or a public one; `Refusal` 400 or 404 without."""
    parts = parse_path(path)
    checkpoint = db.get(Checkpoint, (parts.model_id, parts.kind, parts.name))
    if checkpoint is None or not (checkpoint.is_public or _owns_checkpoint(db, checkpoint, owner)):
        not_found(f"there is no checkpoint {path}; training_runs/{parts.model_id}/checkpoints lists those there are")
    if checkpoint.expires_at is not None and checkpoint.expires_at <= now():
        not_found(f"checkpoint {path} expired at {checkpoint.expires_at:%Y-%m-%d %H:%M:%S} UTC")
    return checkpoint


def own_checkpoint(db: Session, path: str, owner: str) -> Checkpoint:
    """A checkpoint that a user may change."""
    checkpoint = find_checkpoint(db, path, owner)
    if not _owns_checkpoint(db, checkpoint, owner):
        not_found(f"checkpoint {path} is another user's")
    return checkpoint


def _owns_checkpoint(db: Session, checkpoint: Checkpoint, owner: str) -> bool:
    model = db.get(Model, checkpoint.model_id)
    return model is not None and owns(db, model, owner)


def engine_state(db: Session, base_model: str) -> EngineState | None:
    """What the engine last said; None before it was ever there with this base model."""
    state = db.get(EngineState, 1)
    return state if state is not None and state.base_model == base_model else None


# -- accepting


def earlier_request(db: Session, request: Request) -> Request | None:
    """The request that this one repeats; `Refusal` 400 if it is another one of the same number."""
    earlier = db.exec(select(Request).where(*same_number)).first() if (same_number := _same_number(request)) else None
    if earlier is None:
        return None
    if (earlier.payload_hash, earlier.kind) != (request.payload_hash, request.kind):
        where = request.model_id or request.sampling_session_id
        number = request.seq_id if request.model_id else request.sample_seq_id
        refuse(f"seq_id={number} of {where} was another request, {earlier.kind}; count up for each new one")
    return earlier


def _same_number(request: Request) -> list[ColumnElement[bool]]:
    if request.model_id is not None and request.seq_id is not None:
        return [col(Request.model_id) == request.model_id, col(Request.seq_id) == request.seq_id]
    if request.sampling_session_id is not None and request.sample_seq_id is not None:
        return [
            col(Request.sampling_session_id) == request.sampling_session_id,
            col(Request.sample_seq_id) == request.sample_seq_id,
        ]
    return []


def has_trained(db: Session, model_id: str) -> bool:
    """Whether a model has had any request since it was created, but for weights that could not be loaded."""
    others = select(Request.request_id).where(
        Request.model_id == model_id,
        col(Request.seq_id).is_distinct_from(0),
        (col(Request.kind) != Kind.LOAD_WEIGHTS) | (col(Request.status) != RequestStatus.FAILED),
    )
    return db.exec(others.limit(1)).first() is not None


def n_models(db: Session, base_model: str, owner: str | None = None) -> int:
    """Those of a base model that take memory while it is served, or are going to; of one user, or of all."""
    living = (col(Model.status).in_(LIVING), col(Model.base_model) == base_model)
    counted = select(func.count()).select_from(Model).where(*living)
    if owner is not None:
        counted = counted.join(ClientSession).where(ClientSession.owner == owner)
    return db.exec(counted).one()


def fail_waiting(db: Session, model: Model, reason: str) -> None:
    """What waits for a model that could not be brought back fails, but for its unloading, which can be done then."""
    waiting = (
        col(Request.model_id) == model.model_id,
        col(Request.status) == RequestStatus.PENDING,
        col(Request.kind) != Kind.UNLOAD_MODEL,
    )
    error = f"model {model.model_id} could not be brought back: {reason}"
    failed = {"status": RequestStatus.FAILED, "error": error, "error_category": "server", "completed_at": now()}
    db.exec(update(Request).where(*waiting).values(failed))
    model.lost_because = None


def unload_request(db: Session, model_id: str) -> int | None:
    """The number of the request to forget a model, if it was asked already."""
    of_model = (col(Request.model_id) == model_id, col(Request.kind) == Kind.UNLOAD_MODEL)
    return db.exec(select(Request.request_id).where(*of_model)).first()


def queue_unload(db: Session, model: Model, owner: str) -> None:
    """Have the engine forget a model after what was asked of it before; once is enough."""
    if model.status not in LIVING:
        return
    model.status = ModelStatus.UNLOADING
    payload = f'{{"model_id":"{model.model_id}"}}'.encode()
    db.add(
        Request(
            kind=Kind.UNLOAD_MODEL,
            owner=owner,
            session_id=model.session_id,
            model_id=model.model_id,
            payload=payload,
            payload_hash=hash_of(payload),
        )
    )


def end_session(db: Session, session: ClientSession, status: SessionStatus, reason: str) -> None:
    """Nothing more is accepted of it. What it asked to be saved is still saved; the rest, which nobody will ask for, is
    cancelled; and its models are unloaded.
    """
    session.status, session.end_reason = status, reason
    _cancel(db, col(Request.session_id) == session.session_id, col(Request.kind) == Kind.SAMPLE)
    for model in db.exec(select(Model).where(Model.session_id == session.session_id)):
        of_model = col(Request.model_id) == model.model_id
        _cancel(db, of_model, col(Request.kind) != Kind.UNLOAD_MODEL, col(Request.request_id) > _last_save(db, model))
        queue_unload(db, model, session.owner)


def _last_save(db: Session, model: Model) -> int:
    """The last request of a model that waits, and of which something will be left; 0 without one."""
    saves = select(Request).where(
        Request.model_id == model.model_id,
        Request.status == RequestStatus.PENDING,
        col(Request.kind).in_((Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_EXTERNAL, Kind.SAVE_WEIGHTS_FOR_SAMPLER)),
    )
    for request in db.exec(saves.order_by(col(Request.request_id).desc())):
        if json.loads(request.payload).get("path") is not None:  # it has a name
            return request.request_id or 0
    return 0


def _cancel(db: Session, *which: ColumnElement[bool]) -> None:
    waiting = (*which, col(Request.status) == RequestStatus.PENDING)
    db.exec(update(Request).where(*waiting).values(status=RequestStatus.CANCELLED, completed_at=now()))


# -- answering


REQUEST_ID = re.compile(r"[0-9]{1,18}", re.ASCII)


def request_number(request_id: str) -> int:
    """Of the id that a client knows; `Refusal` 404 if it was never one."""
    if not REQUEST_ID.fullmatch(request_id):
        not_found(f"there is no request {request_id[:100]!r}")
    return int(request_id)


def find_request(db: Session, request_id: int, owner: str) -> Request:
    """A request, without its payload and result; `Refusal` 404 without one."""
    light = (defer(col(Request.payload)), defer(col(Request.result)))  # type: ignore[arg-type]
    request = db.get(Request, request_id, options=light)
    if request is None or request.owner != owner:
        not_found(f"there is no request {request_id}; those of ended sessions are kept for a while only")
    return request


def finished_request(db: Session, request_id: int) -> Request | None:
    """A request with its result, without its payload; None while it waits. `Refusal` 410 if it was too long ago."""
    request = db.get(Request, request_id, options=[defer(col(Request.payload))])  # type: ignore[arg-type]
    if request is None:
        not_found(f"there is no request {request_id}")
    if request.status is RequestStatus.PENDING:
        return None
    if request.status is RequestStatus.DONE and request.result is None:
        raise Refusal(410, f"the result of request {request_id} was deleted, since it is too old")
    return request


def why_not_here(db: Session, model_id: str | None, base_model: str) -> str | None:
    """Why requests of a model wait, although there is an engine with this base model; None where they do not."""
    model = None if model_id is None else db.get(Model, model_id)
    if model is None:
        return None
    if model.base_model != base_model:
        return f"it waits until {model.base_model} is served again; this server has {base_model}"
    if model.lost_because is not None:
        return f"model {model_id} could not be brought back, and waits for the next start: {model.lost_because}"
    return None


def still_pending(db: Session) -> set[int]:
    """The ids of all requests that wait."""
    return set(db.exec(select(Request.request_id).where(Request.status == RequestStatus.PENDING)))  # type: ignore[arg-type]


def done_lately(db: Session) -> set[int]:
    """The ids of requests that were done, or given up, in the last seconds."""
    done = col(Request.completed_at) > now() - LATELY
    return set(db.exec(select(Request.request_id).where(done)))  # type: ignore[arg-type]


def cancel_sample(db: Session, request_id: int) -> None:
    """A sample is not wanted any more; done ones stay done, and other kinds are never cancelled."""
    _cancel(db, col(Request.request_id) == request_id, col(Request.kind) == Kind.SAMPLE)


# -- checkpoints


def drop_checkpoint(db: Session, checkpoint: Checkpoint, config: TxConfig) -> Path | None:
    """A checkpoint is not there any more, row and folder at once; what `delete_aside` is to delete."""
    db.delete(checkpoint)
    db.flush()
    return set_aside(checkpoint_folder(config, checkpoint.path))


def expiry(ttl_seconds: int | None) -> datetime | None:
    """When the time of a checkpoint is over."""
    return None if ttl_seconds is None else now() + timedelta(seconds=ttl_seconds)
