"""Rows whose time is over."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, update
from sqlmodel import Session, col, select

from tx.tinker.db_models import GONE, Checkpoint, Model, Request, RequestStatus, SessionStatus, now
from tx.tinker.db_models import Session as ClientSession

MOST_AT_ONCE = 1000
"""Rows that are changed at once, while nobody else can write."""


def stale_sessions(db: Session, timeout: float) -> list[ClientSession]:
    """Active ones that were not heard of for so many seconds."""
    limit = now() - timedelta(seconds=timeout)
    stale = (ClientSession.status == SessionStatus.ACTIVE, col(ClientSession.last_seen_at) < limit)
    return list(db.exec(select(ClientSession).where(*stale)))


def ended_of(db: Session, session_ids: Collection[str]) -> list[str]:
    """Those of some sessions that are not active."""
    is_active = (col(ClientSession.session_id).in_(session_ids), ClientSession.status == SessionStatus.ACTIVE)
    active = set(db.exec(select(ClientSession.session_id).where(*is_active)))
    return sorted(set(session_ids) - active)


def expired_checkpoints(db: Session) -> list[Checkpoint]:
    """Those whose time is over."""
    return list(db.exec(select(Checkpoint).where(col(Checkpoint.expires_at) <= now())))


def forget_results(db: Session, retention: float) -> int:
    """Delete payloads and results that nobody will ask for, nor the engine need to restore a model; how many.

    These are so many at once; there may be more.
    """
    limit = now() - timedelta(seconds=retention)
    is_restored = select(Model.model_id).where(
        Model.model_id == Request.model_id,
        (col(Model.restored_until) >= col(Request.request_id)) | col(Model.status).in_(GONE),
    )
    old = select(Request.request_id).where(
        *_done_before(limit),
        func.length(Request.payload) > 0,
        col(Request.model_id).is_(None) | is_restored.exists(),
    )
    some = col(Request.request_id).in_(old.limit(MOST_AT_ONCE))
    done: Any = db.exec(update(Request).where(some).values(payload=b"", result=None))
    return int(done.rowcount)


def forget_requests(db: Session, retention: float) -> int:
    """Delete requests of sessions that have ended, and of no session, for which the same is true; so many at once."""
    limit = now() - timedelta(seconds=retention)
    is_active = select(ClientSession.session_id).where(
        ClientSession.session_id == Request.session_id, ClientSession.status == SessionStatus.ACTIVE
    )
    is_there = select(Model.model_id).where(Model.model_id == Request.model_id, col(Model.status).not_in(GONE))
    old = select(Request.request_id).where(*_done_before(limit), ~is_active.exists(), ~is_there.exists())
    some = col(Request.request_id).in_(old.limit(MOST_AT_ONCE))
    done: Any = db.exec(delete(Request).where(some))
    return int(done.rowcount)


def _done_before(limit: datetime) -> tuple[ColumnElement[bool], ...]:
    return col(Request.status) != RequestStatus.PENDING, col(Request.completed_at) < limit
