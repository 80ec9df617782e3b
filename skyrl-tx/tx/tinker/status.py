"""What the status page shows, from the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, true
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from tx.tinker.db_models import EngineState, Kind, Model, ModelStatus, Request, RequestStatus, SessionStatus, now
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.store import LIVING, engine_state, n_models

MOST_ROWS = 50
MOST_ERRORS = 20
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of a kind, or of a model."""

    n_waiting: int = 0
    n_done: int = 0  # in the last minute
    mean_seconds: float | None = None  # from acceptance to result, of those


@dataclass(frozen=True, slots=True)
class Status:
    """A look at everything; models, sessions and errors are those of one user, or of all."""

    engine: EngineState | None
    n_models: int  # that count for the server's limit
    n_sessions: int  # active ones
    by_kind: dict[Kind, Work]
    by_model: dict[str, Work]
    models: Sequence[Model]
    sessions: Sequence[ClientSession]
    errors: Sequence[Request]


def pending_by_kind(db: Session) -> dict[Kind, int]:
    """How many requests wait."""
    counted = select(Request.kind, func.count()).where(Request.status == RequestStatus.PENDING).group_by(Request.kind)
    return {Kind(kind): count for kind, count in db.exec(counted)}


def look(db: Session, base_model: str, owner: str | None) -> Status:
    """Now. `owner`: whose models, sessions and errors; None: everybody's."""
    session_is_theirs = true() if owner is None else col(ClientSession.owner) == owner
    request_is_theirs = true() if owner is None else col(Request.owner) == owner
    is_active = col(ClientSession.status) == SessionStatus.ACTIVE
    sessions = (
        select(ClientSession).where(is_active, session_is_theirs).order_by(col(ClientSession.last_seen_at).desc())
    )
    return Status(
        engine=engine_state(db, base_model),
        n_models=n_models(db, base_model),
        n_sessions=_count(db, ClientSession, is_active),
        by_kind=_work(db, col(Request.kind)),
        by_model=_work(db, col(Request.model_id)),
        models=_models(db, session_is_theirs),
        sessions=db.exec(sessions.limit(MOST_ROWS)).all(),
        errors=_errors(db, request_is_theirs),
    )


def _count(db: Session, table: type[Any], which: ColumnElement[bool]) -> int:
    return db.exec(select(func.count()).select_from(table).where(which)).one()


def _models(db: Session, is_theirs: ColumnElement[bool]) -> Sequence[Model]:
    there = col(Model.status).in_((*LIVING, ModelStatus.UNLOADING))
    found = select(Model).join(ClientSession).where(there, is_theirs)
    return db.exec(found.order_by(col(Model.last_request_at).desc()).limit(MOST_ROWS)).all()


def _errors(db: Session, is_theirs: ColumnElement[bool]) -> Sequence[Request]:
    light: Any = (defer(Request.payload), defer(Request.result))  # type: ignore[arg-type]
    failed = select(Request).options(*light).where(Request.status == RequestStatus.FAILED, is_theirs)
    return db.exec(failed.order_by(col(Request.completed_at).desc()).limit(MOST_ERRORS)).all()


def _done_lately() -> ColumnElement[bool]:
    return (col(Request.completed_at) > now() - MINUTE) & (col(Request.status) != RequestStatus.CANCELLED)


def _work(db: Session, by: Any) -> dict[Any, Work]:
    """What waits and what was done, by a column."""
    pending = select(by, func.count()).where(Request.status == RequestStatus.PENDING).group_by(by)
    lately = select(by, func.count(), func.avg(_seconds(db))).where(_done_lately()).group_by(by)
    waiting = dict(db.exec(pending).all())
    done = {key: (count, float(seconds)) for key, count, seconds in db.exec(lately)}
    return {key: Work(waiting.get(key, 0), *done.get(key, (0, None))) for key in {**waiting, **done}}


def _seconds(db: Session) -> ColumnElement[Any]:
    """From acceptance to result. No function for it is known to both kinds of database."""
    if db.get_bind().dialect.name == "sqlite":
        return (func.julianday(Request.completed_at) - func.julianday(Request.created_at)) * 86400
    return func.extract("epoch", col(Request.completed_at) - col(Request.created_at))
