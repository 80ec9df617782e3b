"""Query the data of the status page."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, true
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from tx.tinker.db_models import (
    ClientSession,
    EngineState,
    Kind,
    Model,
    ModelStatus,
    RequestStatus,
    SessionStatus,
    TxRequest,
    now,
)
from tx.tinker.store.queries import ACCEPTING, engine_state, n_models

MAX_ROWS = 50
MAX_ERRORS = 20
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Counts of requests, by kind or by model."""

    n_waiting: int = 0
    n_done: int = 0  # within the last minute
    mean_seconds: float | None = None  # from acceptance to result, within the last minute


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of the server. Models, sessions and errors belong to one user or to all."""

    engine: EngineState | None
    n_models: int  # models that count towards the limit
    n_sessions: int  # active sessions
    by_kind: dict[Kind, RequestCounts]
    by_model: dict[str, RequestCounts]
    models: Sequence[Model]
    sessions: Sequence[ClientSession]
    errors: Sequence[TxRequest]


def pending_by_kind(db: Session) -> dict[Kind, int]:
    """Count pending requests by kind."""
    counted = (
        select(TxRequest.kind, func.count()).where(TxRequest.status == RequestStatus.PENDING).group_by(TxRequest.kind)
    )
    return {Kind(kind): count for kind, count in db.exec(counted)}


def query_status(db: Session, base_model: str, owner: str | None) -> Status:
    """Query the current status. `owner` restricts models, sessions and errors to one user. Counts cover all users."""
    owns_session = true() if owner is None else col(ClientSession.owner) == owner
    owns_request = true() if owner is None else col(TxRequest.owner) == owner
    is_active = col(ClientSession.status) == SessionStatus.ACTIVE
    sessions = select(ClientSession).where(is_active, owns_session)
    is_loaded = col(Model.status).in_((*ACCEPTING, ModelStatus.UNLOADING))
    models = select(Model).join(ClientSession).where(is_loaded, owns_session)
    without_bodies: Any = (defer(TxRequest.payload), defer(TxRequest.result))  # type: ignore[arg-type]
    is_failed = col(TxRequest.status) == RequestStatus.FAILED
    failed = select(TxRequest).options(*without_bodies).where(is_failed, owns_request)
    return Status(
        engine=engine_state(db, base_model),
        n_models=n_models(db, base_model),
        n_sessions=db.exec(select(func.count()).select_from(ClientSession).where(is_active)).one(),
        by_kind=_count_requests(db, col(TxRequest.kind)),
        by_model=_count_requests(db, col(TxRequest.model_id)),
        models=db.exec(models.order_by(col(Model.last_request_at).desc()).limit(MAX_ROWS)).all(),
        sessions=db.exec(sessions.order_by(col(ClientSession.last_seen_at).desc()).limit(MAX_ROWS)).all(),
        errors=db.exec(failed.order_by(col(TxRequest.completed_at).desc()).limit(MAX_ERRORS)).all(),
    )


def _count_requests(db: Session, by: Any) -> dict[Any, RequestCounts]:
    """Count pending and recently finished requests, grouped by a column."""
    seconds: ColumnElement[Any] = func.extract("epoch", col(TxRequest.completed_at) - col(TxRequest.created_at))
    if db.get_bind().dialect.name == "sqlite":
        seconds = (func.julianday(TxRequest.completed_at) - func.julianday(TxRequest.created_at)) * 86400
    pending = select(by, func.count()).where(TxRequest.status == RequestStatus.PENDING).group_by(by)
    is_recent = (col(TxRequest.completed_at) > now() - MINUTE) & (col(TxRequest.status) != RequestStatus.CANCELLED)
    recent = select(by, func.count(), func.avg(seconds)).where(is_recent).group_by(by)
    waiting = dict(db.exec(pending).all())
    done = {key: (count, float(mean)) for key, count, mean in db.exec(recent)}
    return {key: RequestCounts(waiting.get(key, 0), *done.get(key, (0, None))) for key in {**waiting, **done}}
