"""Rows whose time is over."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import func, update
from sqlmodel import Session, col, select

from tx.tinker.db_models import Checkpoint, Model, ModelStatus, Request, RequestStatus, SessionStatus, now
from tx.tinker.db_models import Session as ClientSession


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
    """Delete payloads and results that nobody will ask for, nor the engine need to restore a model; how many."""
    limit = now() - timedelta(seconds=retention)
    is_restored = select(Model.model_id).where(
        Model.model_id == Request.model_id,
        (col(Model.restored_until) >= col(Request.request_id)) | (Model.status == ModelStatus.UNLOADED),
    )
    old = (
        col(Request.status) != RequestStatus.PENDING,
        col(Request.completed_at) < limit,
        func.length(Request.payload) > 0,
        col(Request.model_id).is_(None) | is_restored.exists(),
    )
    done: Any = db.exec(update(Request).where(*old).values(payload=b"", result=None))
    return int(done.rowcount)
