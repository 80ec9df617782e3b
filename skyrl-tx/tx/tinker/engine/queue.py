"""The requests that wait, as the database has them: those of a model in their order, and samples.

What a request asks for is read when it begins, so that a long queue takes no memory. That it has begun is written down:
one that was under way each time an engine died is suspect, is done with nothing beside it, and is given up in the end.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from sqlalchemy import Engine as Database
from sqlalchemy import update
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from tx.tinker.database import reading, writing
from tx.tinker.db_models import Kind, Model, ModelStatus, Request, RequestStatus, now
from tx.tinker.types import TinkerError, UserError

SECONDS_BETWEEN_LOOKS = 0.25  # at whether what has begun is cancelled
TRIES_TOGETHER, MOST_TRIES = 2, 3  # beside other requests; at all
MOST_WORDS = 2000  # characters of an error

T = TypeVar("T")
Also = Callable[[Session], object]


class Waiting(NamedTuple):
    """A request that has not begun."""

    request_id: int
    kind: Kind
    model_id: str | None
    session_id: str | None
    owner: str
    n_tries: int  # by engines that died meanwhile

    @property
    def is_suspect(self) -> bool:
        """Whether it should have nothing beside it."""
        return self.n_tries >= TRIES_TOGETHER


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
    """Requests from the database, until their outcomes are written there.

    Those of models that this engine does not have wait for one that has them: of another base model, and of those that
    could not be brought back.
    """

    database: Database
    base_model: str
    by_model: dict[str, deque[Waiting]] = field(default_factory=dict)
    samples: dict[str, dict[str, deque[Waiting]]] = field(default_factory=dict)  # by user, and then by session
    suspects: deque[Waiting] = field(default_factory=deque)  # samples
    begun: set[int] = field(default_factory=set)
    _last: int = 0
    _is_news: bool = False  # something may have been cancelled
    _looked_at: float = 0.0

    def fetch(self) -> int:
        """Take the requests that have come; how many. Numbers are given in the order in which they are seen."""
        self._is_news = True
        columns = tuple(getattr(Request, name) for name in Waiting._fields)
        is_elsewhere = (col(Model.base_model) != self.base_model) | col(Model.lost_because).is_not(None)
        which = (Request.status == RequestStatus.PENDING, col(Request.request_id) > self._last)
        with reading(self.database) as session:
            not_here = select(Model.model_id).where(Model.model_id == Request.model_id, is_elsewhere)
            come = select(*columns).where(*which, ~not_here.exists())
            new = [Waiting(*row) for row in session.exec(come.order_by(col(Request.request_id)))]
        for one in new:
            self._put(one)
            self._last = one.request_id
        return len(new)

    def _put(self, one: Waiting) -> None:
        if one.kind != Kind.SAMPLE:
            self.by_model.setdefault(one.model_id or "", deque()).append(one)
        elif one.is_suspect:
            self.suspects.append(one)
        else:
            self.samples.setdefault(one.owner, {}).setdefault(one.session_id or "", deque()).append(one)

    # -- beginning

    def heads(self, busy: Collection[str]) -> list[Waiting]:
        """The next request of every model that is not busy."""
        return [waiting[0] for model_id, waiting in self.by_model.items() if model_id not in busy]

    def next_suspect(self, busy: Collection[str]) -> Waiting | None:
        """A request that should begin alone, if there is one."""
        suspects = [head for head in self.heads(busy) if head.is_suspect]
        return suspects[0] if suspects else self.suspects[0] if self.suspects else None

    def next_samples(self, n_free: int, running_by_owner: Mapping[str, int]) -> list[Waiting]:
        """Samples that there is room for: users take turns, and the sessions of each do.

        Nobody has more of them than there is room left, so that a user who comes later need not wait: one alone takes
        half of all room, of two each a third.
        """
        chosen: list[Waiting] = []
        running = Counter(running_by_owner)
        while True:
            owner = next((one for one in self.samples if running[one] < n_free - len(chosen)), None)
            if owner is None:
                return chosen
            sessions = self.samples.pop(owner)
            session_id, waiting = pop_first(sessions)
            chosen.append(waiting.popleft())
            running[owner] += 1
            if waiting:
                sessions[session_id] = waiting  # at the end of the row
            if sessions:
                self.samples[owner] = sessions

    def begin(self, chosen: Sequence[Waiting]) -> list[Request]:
        """They are under way from now on, and read: all but those that were cancelled while they waited."""
        if not chosen:
            return []
        for one in chosen:
            self._take(one)
        ids = [one.request_id for one in chosen]
        waiting = (col(Request.request_id).in_(ids), col(Request.status) == RequestStatus.PENDING)
        with writing(self.database) as session:
            session.exec(update(Request).where(*waiting).values(n_tries=col(Request.n_tries) + 1))
            found = select(Request).where(*waiting).options(defer(col(Request.result)))  # type: ignore[arg-type]
            requests = list(session.exec(found.order_by(col(Request.request_id))))
        self.begun.update(_id(request) for request in requests)
        return requests

    def _take(self, one: Waiting) -> None:
        if one.kind == Kind.SAMPLE:
            if self.suspects and self.suspects[0] is one:
                self.suspects.popleft()
            return
        waiting = self.by_model[one.model_id or ""]
        assert waiting[0] is one, "requests of a model begin in their order"
        waiting.popleft()
        if not waiting:
            del self.by_model[one.model_id or ""]

    # -- ending

    def cancelled(self) -> set[int]:
        """What has begun and is not wanted any more; looked for after `fetch`, and not too often."""
        if not self.begun:
            self._is_news = False  # what was fetched is not begun yet
        if not self._is_news or time.monotonic() - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return set()
        self._is_news, self._looked_at = False, time.monotonic()
        with reading(self.database) as session:
            gone = (col(Request.request_id).in_(self.begun), col(Request.status) == RequestStatus.CANCELLED)
            return set(session.exec(select(Request.request_id).where(*gone)))  # type: ignore[arg-type]

    def forget(self, request_id: int) -> None:
        """It is not under way any more, and has no outcome."""
        self.begun.discard(request_id)

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
        self.begun.difference_update(one.request_id for one in done)

    def put_back(self) -> None:
        """The engine ends of its own accord: what has begun is not to blame."""
        with writing(self.database) as session:
            session.exec(update(Request).where(col(Request.request_id).in_(self.begun)).values(n_tries=0))
        self.begun.clear()


def pop_first(row: dict[str, T]) -> tuple[str, T]:
    """The first of a row, whose turn it is, and who has it."""
    key = next(iter(row))
    return key, row.pop(key)


def given_up(one: Waiting) -> Outcome | None:
    """The outcome of a request that has been under way whenever an engine died; None of any other."""
    if one.n_tries < MOST_TRIES:
        return None
    words = f"the engine has died {one.n_tries} times while it did this request, the last time nothing beside it"
    error = TinkerError(f"{words}; the server's log says of what")
    return Outcome(one.request_id, error=error, also=partial(_never_made, model_id=one.model_id))


def _never_made(session: Session, model_id: str | None) -> None:
    """A model whose first request was given up takes no place any more."""
    model = None if model_id is None else session.get(Model, model_id)
    if model is not None and model.status is ModelStatus.PENDING:
        model.status = ModelStatus.FAILED


def _columns(one: Outcome) -> dict[str, object]:
    if one.error is None:
        return {
            "status": RequestStatus.DONE,
            "result": one.result,
            "is_result_protobuf": one.is_protobuf,
            "completed_at": now(),
        }
    return {
        "status": RequestStatus.FAILED,
        "error": in_words(one.error),
        "error_category": "user" if isinstance(one.error, UserError) else "server",
        "completed_at": now(),
    }


def in_words(error: Exception) -> str:
    """What a database takes as text: a library's message may hold anything."""
    told = str(error) if isinstance(error, TinkerError) else f"{type(error).__name__}: {error}"
    return told[:MOST_WORDS].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _id(request: Request) -> int:
    assert request.request_id is not None
    return request.request_id
