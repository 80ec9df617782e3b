"""Limits on pending requests. Counts are cached: between two database counts, accepted requests are added to them."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import func
from sqlmodel import Session, col, select

from tx.tinker.db_models import Request, RequestStatus
from tx.tinker.refusal import busy

RECOUNT_SEC = 0.25
"""Minimum seconds between two counts of a full queue."""
MAX_QUEUES = 4096
"""Maximum number of cached counts."""


class QueueKey(NamedTuple):
    """A queue of requests: of a model, of a sampling session, or of a user's requests without either."""

    owner: str
    model_id: str | None
    sampling_session_id: str | None

    def __str__(self) -> str:
        return self.model_id or self.sampling_session_id or "the base model"


@dataclass(slots=True)
class _Backlog:
    """An upper bound on a queue's pending requests and bytes: its last count and all requests accepted since."""

    n_requests: int
    n_bytes: int
    counted_at: float


class Admission:
    """Admission control of a server. Only the writer thread uses it."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._known: OrderedDict[QueueKey, _Backlog] = OrderedDict()

    def admit(self, db: Session, request: Request) -> None:
        """Count a request that is about to be accepted; raise `Refusal` 429 if its queue is full."""
        key = QueueKey(request.owner, request.model_id, request.sampling_session_id)
        n_bytes = len(request.payload)
        waiting = self._waiting(db, key, n_bytes)
        if (refusal := self._refusal(waiting, n_bytes)) is not None:
            busy(refusal.format(key=key))
        waiting.n_requests += 1
        waiting.n_bytes += n_bytes

    def _waiting(self, db: Session, key: QueueKey, n_bytes: int) -> _Backlog:
        """Return the bounds of a queue. Recount before a refusal, but at most every `RECOUNT_SEC`."""
        waiting = self._known.pop(key, None)
        is_old = waiting is not None and time.monotonic() - waiting.counted_at > RECOUNT_SEC
        if waiting is None or (is_old and self._refusal(waiting, n_bytes) is not None):
            waiting = _count(db, key)
        self._known[key] = waiting
        if len(self._known) > MAX_QUEUES:
            self._known.popitem(last=False)
        return waiting

    def _refusal(self, waiting: _Backlog, n_bytes: int) -> str | None:
        """Return why another request of `n_bytes` is refused; None if it is admitted."""
        if waiting.n_requests >= self._max_requests:
            return f"{waiting.n_requests} requests of {{key}} are pending, which is the limit; wait for some of them"
        if waiting.n_requests and waiting.n_bytes + n_bytes > self._max_bytes:
            return f"requests of {{key}} with {waiting.n_bytes} bytes are pending; wait for some of them"
        return None


def _count(db: Session, key: QueueKey) -> _Backlog:
    query = select(func.count(), func.coalesce(func.sum(func.length(Request.payload)), 0)).where(
        Request.status == RequestStatus.PENDING,
        Request.owner == key.owner,
        col(Request.model_id).is_not_distinct_from(key.model_id),
        col(Request.sampling_session_id).is_not_distinct_from(key.sampling_session_id),
    )
    n_requests, n_bytes = db.exec(query).one()
    return _Backlog(int(n_requests), int(n_bytes), time.monotonic())
