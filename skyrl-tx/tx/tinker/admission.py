"""How much may wait. What waits is counted only now and then, since what is accepted meanwhile is known."""

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
"""A line that is full is not counted more often."""
MOST_LINES = 4096
"""That are remembered; others are counted anew."""


class Line(NamedTuple):
    """Requests that wait for each other: of a model, of a sampling session, or of a user who has none of both."""

    owner: str
    model_id: str | None
    sampling_session_id: str | None

    def __str__(self) -> str:
        return self.model_id or self.sampling_session_id or "the base model"


@dataclass(slots=True)
class _Waiting:
    """At most so many requests, of so many bytes: those when they were counted, and all that were accepted since."""

    n_requests: int
    n_bytes: int
    counted_at: float


class Admission:
    """Of one server. It is used by the thread that writes, and by no other."""

    def __init__(self, most_requests: int, most_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._known: OrderedDict[Line, _Waiting] = OrderedDict()

    def admit(self, db: Session, request: Request) -> None:
        """Note a request that is about to be accepted; `Refusal` 429 if too much of its line waits already."""
        line = Line(request.owner, request.model_id, request.sampling_session_id)
        n_bytes = len(request.payload)
        waiting = self._waiting(db, line, n_bytes)
        if (refusal := self._refusal(waiting, n_bytes)) is not None:
            busy(refusal.format(line=line))
        waiting.n_requests += 1
        waiting.n_bytes += n_bytes

    def _waiting(self, db: Session, line: Line, n_bytes: int) -> _Waiting:
        """Counted again before anything is refused, though not too often."""
        waiting = self._known.pop(line, None)
        is_old = waiting is not None and time.monotonic() - waiting.counted_at > RECOUNT_SEC
        if waiting is None or (is_old and self._refusal(waiting, n_bytes) is not None):
            waiting = _count(db, line)
        self._known[line] = waiting
        if len(self._known) > MOST_LINES:
            self._known.popitem(last=False)
        return waiting

    def _refusal(self, waiting: _Waiting, n_bytes: int) -> str | None:
        """Of so many bytes more; None if they are admitted."""
        if waiting.n_requests >= self._most_requests:
            return f"{waiting.n_requests} requests of {{line}} wait already, which is the limit; wait for some of them"
        if waiting.n_requests and waiting.n_bytes + n_bytes > self._most_bytes:
            return f"requests of {{line}} with {waiting.n_bytes} bytes wait already; wait for some of them"
        return None


def _count(db: Session, line: Line) -> _Waiting:
    counted = select(func.count(), func.coalesce(func.sum(func.length(Request.payload)), 0)).where(
        Request.status == RequestStatus.PENDING,
        Request.owner == line.owner,
        col(Request.model_id).is_not_distinct_from(line.model_id),
        col(Request.sampling_session_id).is_not_distinct_from(line.sampling_session_id),
    )
    n_requests, n_bytes = db.exec(counted).one()
    return _Waiting(int(n_requests), int(n_bytes), time.monotonic())
