"""List a user's training runs, checkpoints and sessions."""

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, and_, false, func, or_
from sqlmodel import Session, col, select
from sqlmodel.sql.expression import Select, SelectOfScalar

from tx.tinker.db_models import Checkpoint, CheckpointKind, ClientSession, Model, SamplingSession, SessionStatus, now
from tx.tinker.refusal import refuse
from tx.tinker.wire import listings
from tx.tinker.wire.listings import SearchSessionsRequest, StatusFilter

T = TypeVar("T")
MAX_SCANNED = 10_000
"""Maximum number of sessions that a metadata search scans."""
MAX_WORDS = 64
"""Maximum number of words in a display name search."""

TYPES = {CheckpointKind.TRAINING: "training", CheckpointKind.SAMPLER: "sampler", CheckpointKind.EXTERNAL: "external"}


def as_text(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Convert metadata to text values: clients may write any JSON, but read only text."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


def checkpoint_info(checkpoint: Checkpoint) -> listings.CheckpointInfo:
    """Describe a checkpoint for a list."""
    return listings.CheckpointInfo(
        checkpoint_id=f"{checkpoint.kind}/{checkpoint.name}",
        checkpoint_type=TYPES[checkpoint.kind],
        time=checkpoint.created_at,
        tinker_path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.is_public,
        user_metadata=as_text(checkpoint.user_metadata),
        expires_at=checkpoint.expires_at,
    )


def _is_alive() -> ColumnElement[bool]:
    return or_(col(Checkpoint.expires_at).is_(None), col(Checkpoint.expires_at) > now())


def _newest_first() -> tuple[Any, ...]:
    return col(Checkpoint.created_at).desc(), col(Checkpoint.model_id), col(Checkpoint.kind), col(Checkpoint.name)


def checkpoints_of(db: Session, model_ids: Collection[str]) -> list[Checkpoint]:
    """Return the checkpoints of some models, newest first."""
    found = select(Checkpoint).where(col(Checkpoint.model_id).in_(model_ids), _is_alive())
    return list(db.exec(found.order_by(*_newest_first())))


def list_checkpoints(
    db: Session, owner: str, kinds: Collection[CheckpointKind], *, limit: int, offset: int
) -> listings.CheckpointList:
    """Return a page of a user's checkpoints over all runs, newest first."""
    found = (
        select(Checkpoint)
        .join(Model, col(Model.model_id) == Checkpoint.model_id)
        .join(ClientSession, col(ClientSession.session_id) == Model.session_id)
        .where(ClientSession.owner == owner, col(Checkpoint.kind).in_(kinds), _is_alive())
    )
    page = db.exec(found.order_by(*_newest_first()).limit(limit).offset(offset))
    cursor = listings.Cursor(offset=offset, limit=limit, total_count=_count(db, found))
    return listings.CheckpointList(checkpoints=[checkpoint_info(checkpoint) for checkpoint in page], cursor=cursor)


def _count(db: Session, found: SelectOfScalar[T] | Select[T]) -> int:
    return db.exec(select(func.count()).select_from(found.order_by(None).subquery())).one()


def training_run(model: Model, owner: str, checkpoints: Iterable[Checkpoint]) -> listings.TrainingRun:
    """Describe a training run. `checkpoints` are the run's, newest first."""
    newest: dict[CheckpointKind, listings.CheckpointInfo] = {}
    for checkpoint in checkpoints:
        newest.setdefault(checkpoint.kind, checkpoint_info(checkpoint))
    return listings.TrainingRun(
        training_run_id=model.model_id,
        base_model=model.base_model,
        model_owner=owner,
        is_lora=model.rank > 0,
        lora_rank=model.rank or None,
        last_request_time=model.last_request_at,
        last_checkpoint=newest.get(CheckpointKind.TRAINING),
        last_sampler_checkpoint=newest.get(CheckpointKind.SAMPLER),
        user_metadata=as_text(model.user_metadata),
    )


def list_training_runs(
    db: Session, owner: str, project_id: str | None, *, limit: int, offset: int
) -> listings.TrainingRunList:
    """Return a page of a user's training runs, most recently used first."""
    is_asked = [ClientSession.owner == owner]
    if project_id is not None:
        is_asked.append(ClientSession.project_id == project_id)
    found = select(Model).join(ClientSession, col(ClientSession.session_id) == Model.session_id).where(*is_asked)
    order = (col(Model.last_request_at).desc(), col(Model.model_id))
    models = list(db.exec(found.order_by(*order).limit(limit).offset(offset)))
    by_model: dict[str, list[Checkpoint]] = {}
    for checkpoint in checkpoints_of(db, [model.model_id for model in models]):
        by_model.setdefault(checkpoint.model_id, []).append(checkpoint)
    return listings.TrainingRunList(
        training_runs=[training_run(model, owner, by_model.get(model.model_id, ())) for model in models],
        cursor=listings.Cursor(offset=offset, limit=limit, total_count=_count(db, found)),
    )


def list_sessions(db: Session, owner: str, *, limit: int, offset: int) -> listings.SessionList:
    """Return a page of a user's sessions, newest first."""
    found = select(ClientSession.session_id).where(ClientSession.owner == owner)
    page = found.order_by(col(ClientSession.created_at).desc(), col(ClientSession.session_id)).limit(limit)
    return listings.SessionList(sessions=list(db.exec(page.offset(offset))))


def session_info(db: Session, session: ClientSession) -> listings.SessionInfo:
    """Describe a session with its runs and samplers, in order of creation."""
    models = select(Model.model_id).where(Model.session_id == session.session_id).order_by(col(Model.model_seq_id))
    samplers = select(SamplingSession.sampling_session_id).where(SamplingSession.session_id == session.session_id)
    return listings.SessionInfo(
        training_run_ids=list(db.exec(models)),
        sampler_ids=list(db.exec(samplers.order_by(col(SamplingSession.seq_id)))),
        user_metadata=as_text(session.user_metadata),
        display_name=session.display_name,
    )


def search_sessions(db: Session, owner: str, query: SearchSessionsRequest) -> listings.SessionsFound:
    """Return a page of matching sessions, newest first."""
    order = (col(ClientSession.created_at).desc(), col(ClientSession.session_id).desc())
    scanned = db.exec(select(ClientSession).where(*_matches(owner, query)).order_by(*order).limit(MAX_SCANNED))
    metadata = query.user_metadata.items()
    found = [session for session in scanned if metadata <= (as_text(session.user_metadata) or {}).items()][
        : query.limit + 1
    ]
    page = found[: query.limit]
    sums = (
        select(Model.session_id, func.count(), func.sum(Checkpoint.size_bytes))
        .join(Checkpoint, col(Checkpoint.model_id) == Model.model_id)
        .where(col(Model.session_id).in_([session.session_id for session in page]), _is_alive())
        .group_by(col(Model.session_id))
    )
    sizes = {session_id: (count, size or 0) for session_id, count, size in db.exec(sums)}
    last = page[-1] if len(found) > query.limit else None
    return listings.SessionsFound(
        sessions=[_summary(session, *sizes.get(session.session_id, (0, 0))) for session in page],
        next_cursor=None
        if last is None
        else listings.SearchCursor(last_created_at=last.created_at, last_session_id=last.session_id),
    )


def _matches(owner: str, query: SearchSessionsRequest) -> list[ColumnElement[bool]]:
    wanted: list[ColumnElement[bool]] = [col(ClientSession.owner) == owner]
    if query.project_ids is not None:
        wanted.append(col(ClientSession.project_id).in_(query.project_ids))
    if query.statuses is not None:
        wanted.append(or_(*(_has_status(status) for status in query.statuses)))
    words = sorted(set((query.display_name or "").split()))
    if len(words) > MAX_WORDS:
        refuse(f"display_name has {len(words)} words; use at most {MAX_WORDS}")
    names = [col(ClientSession.display_name).icontains(word, autoescape=True) for word in words]
    either = [and_(*names)] if names else []
    if query.session_id is not None:
        either.append(col(ClientSession.session_id) == query.session_id)
    if either:
        wanted.append(or_(*either))
    if query.cursor is not None:
        time, created = query.cursor.last_created_at, col(ClientSession.created_at)
        try:  # times without a zone are UTC, like all times that clients receive
            time = time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC)
        except OverflowError:
            refuse(f"cursor.last_created_at={time} is out of range; use the cursor of a page")
        is_later = col(ClientSession.session_id) < query.cursor.last_session_id
        wanted.append(or_(created < time, and_(created == time, is_later)))
    return wanted


def _has_status(query: StatusFilter) -> ColumnElement[bool]:
    statuses = {
        "active": SessionStatus.ACTIVE,
        "client_finished": SessionStatus.FINISHED,
        "cancelled": SessionStatus.EXPIRED,
    }
    if query.type not in statuses:
        return col(ClientSession.session_id).is_(None)  # no rows: sessions never fail here
    is_status = col(ClientSession.status) == statuses[query.type]
    if query.type != "client_finished" or query.reasons is None:
        return is_status
    reasons = [col(ClientSession.end_reason).startswith(reason) for reason in sorted(set(query.reasons))]
    return and_(is_status, or_(false(), *reasons))


def _summary(session: ClientSession, n_checkpoints: int, size: int) -> listings.SessionSummary:
    return listings.SessionSummary(
        session_id=session.session_id,
        created_at=session.created_at,
        owner=session.owner,
        project_id=session.project_id or "",
        status=_status(session),
        checkpoints_count=n_checkpoints,
        display_name=session.display_name,
        user_metadata=as_text(session.user_metadata),
        checkpoint_storage_bytes=size,
    )


def _status(session: ClientSession) -> listings.StatusInfo:
    if session.status is SessionStatus.ACTIVE:
        return listings.StatusInfo(type="active")
    reason, _, detail = (session.end_reason or "").partition(": ")
    if session.status is SessionStatus.EXPIRED or reason not in ("success", "errored", "interrupted"):
        return listings.StatusInfo(type="cancelled", detail=session.end_reason)
    return listings.StatusInfo(type="client_finished", reason=listings.FinishInfo(type=reason), detail=detail or None)
