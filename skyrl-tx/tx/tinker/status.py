"""What the status page shows, from the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import func
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from tx.tinker.db_models import EngineState, Kind, Model, ModelStatus, Request, RequestStatus, SessionStatus, now
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.store import LIVING

MOST_ROWS = 50
MOST_ERRORS = 20
RECENT_REQUESTS = 5000
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Status:
    """A look at everything."""

    engine: EngineState | None
    models: Sequence[Model]
    sessions: Sequence[ClientSession]
    pending: dict[Kind, int]
    done_last_minute: dict[Kind, tuple[int, float]]  # how many, and the mean of their seconds
    errors: Sequence[Request]


def pending_by_kind(db: Session) -> dict[Kind, int]:
    """How many requests wait."""
    counted = select(Request.kind, func.count()).where(Request.status == RequestStatus.PENDING).group_by(Request.kind)
    return {Kind(kind): count for kind, count in db.exec(counted)}


def look(db: Session) -> Status:
    """Now."""
    there = (*LIVING, ModelStatus.UNLOADING)
    models = select(Model).where(col(Model.status).in_(there)).order_by(col(Model.last_request_at).desc())
    sessions = select(ClientSession).where(ClientSession.status == SessionStatus.ACTIVE)
    recent = _recent(db)
    return Status(
        engine=db.get(EngineState, 1),
        models=db.exec(models.limit(MOST_ROWS)).all(),
        sessions=db.exec(sessions.order_by(col(ClientSession.last_seen_at).desc()).limit(MOST_ROWS)).all(),
        pending=pending_by_kind(db),
        done_last_minute=_throughput(recent),
        errors=[one for one in recent if one.status is RequestStatus.FAILED][:MOST_ERRORS],
    )


def _recent(db: Session) -> Sequence[Request]:
    """The last requests, without what is large, the newest first."""
    light: Any = (defer(Request.payload), defer(Request.result))  # type: ignore[arg-type]
    return db.exec(
        select(Request).options(*light).order_by(col(Request.request_id).desc()).limit(RECENT_REQUESTS)
    ).all()


def _throughput(recent: Sequence[Request]) -> dict[Kind, tuple[int, float]]:
    since = now() - MINUTE
    seconds: dict[Kind, list[float]] = {}
    for one in recent:
        if one.completed_at is not None and one.completed_at > since:
            seconds.setdefault(one.kind, []).append((one.completed_at - one.created_at).total_seconds())
    return {kind: (len(each), sum(each) / len(each)) for kind, each in seconds.items()}
