"""Limits on pending requests. Counts are cached: each accepted request is added to the last database count."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Self

from sqlalchemy import func
from sqlmodel import Session, col, select

from tx.tinker.config import TxConfig
from tx.tinker.db_models import RequestStatus, TxRequest
from tx.tinker.refusal import busy

RECOUNT_SEC = 0.25
"""Minimum seconds between two counts of a full queue."""
MAX_QUEUES = 4096
"""Maximum number of cached counts."""


class QueueLimits(NamedTuple):
    """Maximum number of pending requests, and of their bytes."""

    n_requests: int
    n_bytes: int


class QueueKey(NamedTuple):
    """A queue: the requests of a model or a sampling session, a user's requests for neither, or all of a user's."""

    owner: str
    model_id: str | None = None
    sampling_session_id: str | None = None
    has_all: bool = False  # all requests of the user

    def __str__(self) -> str:
        return "this user" if self.has_all else self.model_id or self.sampling_session_id or "the base model"


@dataclass(slots=True)
class _Backlog:
    """An upper bound on a queue's pending requests and bytes: its last count and all requests accepted since."""

    n_requests: int
    n_bytes: int
    counted_at: float


class Admission:
    """Admission control of a server. Only the writer thread uses it."""

    def __init__(self, queue: QueueLimits, user: QueueLimits) -> None:
        self._queue = queue
        self._user = user
        self._known: OrderedDict[QueueKey, _Backlog] = OrderedDict()

    @classmethod
    def from_config(cls, config: TxConfig) -> Self:
        """Create an `Admission` with the configured limits."""
        return cls(
            QueueLimits(config.max_queued_requests, config.max_queued_bytes),
            QueueLimits(config.max_queued_requests_per_user, config.max_queued_bytes_per_user),
        )

    def admit(self, db: Session, request: TxRequest) -> None:
        """Count a request before it is accepted. Raise `RefusalError` 429 if its queue or its user's queue is full."""
        n_bytes = len(request.payload)
        queues = (
            (QueueKey(request.owner, request.model_id, request.sampling_session_id), self._queue),
            (QueueKey(request.owner, has_all=True), self._user),
        )
        backlogs = [self._backlog(db, key, limits, n_bytes) for key, limits in queues]
        for backlog in backlogs:
            backlog.n_requests += 1
            backlog.n_bytes += n_bytes

    def _backlog(self, db: Session, key: QueueKey, limits: QueueLimits, n_bytes: int) -> _Backlog:
        """Return the backlog of a queue with room for a request. Raise `RefusalError` 429 if it is full.

        Recount before a rejection, but at most every `RECOUNT_SEC`.
        """
        backlog = self._known.pop(key, None)
        is_old = backlog is not None and time.monotonic() - backlog.counted_at > RECOUNT_SEC
        if backlog is None or (is_old and _refusal(key, backlog, limits, n_bytes) is not None):
            backlog = _count(db, key)
        self._known[key] = backlog
        if len(self._known) > MAX_QUEUES:
            self._known.popitem(last=False)
        if (refusal := _refusal(key, backlog, limits, n_bytes)) is not None:
            busy(refusal)
        return backlog


def _refusal(key: QueueKey, backlog: _Backlog, limits: QueueLimits, n_bytes: int) -> str | None:
    """Return why one more request of `n_bytes` is rejected, or None if it is admitted."""
    if backlog.n_requests >= limits.n_requests:
        return f"{backlog.n_requests} requests of {key} are pending, which is the limit; wait for some of them"
    if backlog.n_requests and backlog.n_bytes + n_bytes > limits.n_bytes:
        return (
            f"requests of {key} with {backlog.n_bytes} bytes are pending, and {n_bytes} more would exceed the limit of "
            f"{limits.n_bytes}; wait for some of them"
        )
    return None


def _count(db: Session, key: QueueKey) -> _Backlog:
    query = select(func.count(), func.coalesce(func.sum(func.length(TxRequest.payload)), 0)).where(
        TxRequest.status == RequestStatus.PENDING, TxRequest.owner == key.owner
    )
    if not key.has_all:
        query = query.where(
            col(TxRequest.model_id).is_not_distinct_from(key.model_id),
            col(TxRequest.sampling_session_id).is_not_distinct_from(key.sampling_session_id),
        )
    n_requests, n_bytes = db.exec(query).one()
    return _Backlog(int(n_requests), int(n_bytes), time.monotonic())
