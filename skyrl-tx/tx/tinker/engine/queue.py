"""The requests that wait, as the database has them: those of a model in their order, and samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Engine as Database
from sqlalchemy import update
from sqlmodel import Session, col, select

from tx.tinker.database import reading, writing
from tx.tinker.db_models import Kind, Request, RequestStatus, now
from tx.tinker.types import UserError

MOST_AT_ONCE = 256  # requests that are read at once

Also = Callable[[Session], object]


@dataclass(slots=True)
class Outcome:
    """What came of a request."""

    request_id: int
    result: bytes | None = None
    is_protobuf: bool = False
    error: Exception | None = None
    also: Also | None = None  # what else is true from then on


@dataclass(slots=True)
class Queue:
    """Requests from the database, until their outcomes are written there."""

    database: Database
    by_model: dict[str, deque[Request]] = field(default_factory=dict)
    samples: dict[str, deque[Request]] = field(default_factory=dict)  # by session, so that each has its turn
    cancelled: set[int] = field(default_factory=set)
    _known: set[int] = field(default_factory=set)

    def fetch(self) -> int:
        """Take the requests that have come; how many."""
        with reading(self.database) as session:
            ids = session.exec(select(Request.request_id).where(Request.status == RequestStatus.PENDING)).all()
            new = sorted(one for one in ids if one is not None and one not in self._known)
            for start in range(0, len(new), MOST_AT_ONCE):
                some = select(Request).where(col(Request.request_id).in_(new[start : start + MOST_AT_ONCE]))
                for request in session.exec(some.order_by(col(Request.request_id))):
                    self._put(request)
        self.cancelled = self._known.difference(one for one in ids if one is not None)
        return len(new)

    def finish(self, outcomes: Iterable[Outcome]) -> None:
        """Write what came of requests. A request that was cancelled meanwhile stays so."""
        done = list(outcomes)
        with writing(self.database) as session:
            for one in done:
                session.exec(
                    update(Request)
                    .where(col(Request.request_id) == one.request_id, col(Request.status) == RequestStatus.PENDING)
                    .values(_columns(one))
                )
                if one.also is not None:
                    one.also(session)
        self._known -= {one.request_id for one in done}

    def _put(self, request: Request) -> None:
        self._known.add(_id(request))
        if request.kind == Kind.SAMPLE:
            self.samples.setdefault(request.session_id or "", deque()).append(request)
        else:
            self.by_model.setdefault(request.model_id or "", deque()).append(request)

    def heads(self, busy: Sequence[str] | set[str]) -> list[Request]:
        """The next request of every model that is not busy."""
        return [waiting[0] for model_id, waiting in self.by_model.items() if waiting and model_id not in busy]

    def pop(self, request: Request) -> None:
        """The head of a model has begun."""
        waiting = self.by_model[request.model_id or ""]
        assert waiting[0] is request, "requests of a model begin in their order"
        waiting.popleft()
        if not waiting:
            del self.by_model[request.model_id or ""]

    def next_sample(self) -> Request | None:
        """The next sample request: the sessions take turns."""
        for session_id in list(self.samples):
            waiting = self.samples.pop(session_id)
            request = waiting.popleft()
            if waiting:
                self.samples[session_id] = waiting  # at the end of the row
            if request.request_id not in self.cancelled:
                return request
            self._known.discard(_id(request))
        return None


def _columns(one: Outcome) -> dict[str, object]:
    if one.error is None:
        return {
            "status": RequestStatus.DONE,
            "result": one.result,
            "is_result_protobuf": one.is_protobuf,
            "completed_at": now(),
        }
    is_users = isinstance(one.error, UserError)
    message = str(one.error) if is_users else f"{type(one.error).__name__}: {one.error}"
    return {
        "status": RequestStatus.FAILED,
        "error": message,
        "error_category": "user" if is_users else "server",
        "completed_at": now(),
    }


def _id(request: Request) -> int:
    assert request.request_id is not None
    return request.request_id
