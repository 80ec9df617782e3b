"""Queries for active sessions, expired checkpoints, and requests that are no longer needed."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, update
from sqlmodel import Session, col, select
from sqlmodel.sql.expression import SelectOfScalar

from tx.tinker.db_models import GONE, Checkpoint, ClientSession, Model, RequestStatus, SessionStatus, TxRequest, now

MAX_ROWS = 1000
"""Maximum number of rows per transaction, since a transaction blocks other writers."""


def active_sessions(db: Session) -> dict[str, datetime]:
    """Return the active sessions and when each was last seen."""
    seen = select(ClientSession.session_id, ClientSession.last_seen_at)
    return dict(db.exec(seen.where(ClientSession.status == SessionStatus.ACTIVE)).all())


def ended_sessions(db: Session, session_ids: Collection[str]) -> list[str]:
    """Return the sessions in `session_ids` that are not active."""
    is_active = (col(ClientSession.session_id).in_(session_ids), ClientSession.status == SessionStatus.ACTIVE)
    active = set(db.exec(select(ClientSession.session_id).where(*is_active)))
    return sorted(set(session_ids) - active)


def expired_checkpoints(db: Session) -> list[Checkpoint]:
    """Return expired checkpoints."""
    return list(db.exec(select(Checkpoint).where(col(Checkpoint.expires_at) <= now())))


def clear_payloads(db: Session) -> int:
    """Clear payloads of finished requests that no restore needs. Return the number of rows, at most `MAX_ROWS`."""
    is_restored = select(Model.model_id).where(
        Model.model_id == TxRequest.model_id,
        (col(Model.restored_until) >= col(TxRequest.request_id)) | col(Model.status).in_(GONE),
    )
    unneeded = select(TxRequest.request_id).where(
        TxRequest.status != RequestStatus.PENDING,
        func.length(TxRequest.payload) > 0,
        col(TxRequest.model_id).is_(None) | is_restored.exists(),
    )
    return _clear(db, unneeded, payload=b"")


def clear_results(db: Session, retention: float) -> int:
    """Clear results older than `retention` seconds. Return the number of rows, at most `MAX_ROWS`."""
    old = _done_before(now() - timedelta(seconds=retention))
    return _clear(db, select(TxRequest.request_id).where(*old, col(TxRequest.result).is_not(None)), result=None)


def _clear(db: Session, request_ids: SelectOfScalar[Any], **values: object) -> int:
    """Set columns of at most `MAX_ROWS` requests. Return the number of rows."""
    rows = col(TxRequest.request_id).in_(request_ids.limit(MAX_ROWS))
    done: Any = db.exec(update(TxRequest).where(rows).values(values))
    return int(done.rowcount)


def delete_requests(db: Session, retention: float) -> int:
    """Delete old requests without an active session or living model. Return the number of rows, at most `MAX_ROWS`."""
    limit = now() - timedelta(seconds=retention)
    is_active = select(ClientSession.session_id).where(
        ClientSession.session_id == TxRequest.session_id, ClientSession.status == SessionStatus.ACTIVE
    )
    has_model = select(Model.model_id).where(Model.model_id == TxRequest.model_id, col(Model.status).not_in(GONE))
    old = select(TxRequest.request_id).where(*_done_before(limit), ~is_active.exists(), ~has_model.exists())
    rows = col(TxRequest.request_id).in_(old.limit(MAX_ROWS))
    done: Any = db.exec(delete(TxRequest).where(rows))
    return int(done.rowcount)


def _done_before(limit: datetime) -> tuple[ColumnElement[bool], ...]:
    return col(TxRequest.status) != RequestStatus.PENDING, col(TxRequest.completed_at) < limit
