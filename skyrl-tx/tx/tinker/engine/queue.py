"""The pending requests in the database: each model's in order, and samples.

Payloads are read when a request begins, so a long queue takes little memory. The number of tries is recorded: a request
during which two engines died is suspect and runs alone. If a third one dies, it fails.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from sqlalchemy import Engine as Database
from sqlalchemy import update
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from tx.tinker.db_models import Kind, Model, ModelStatus, RequestStatus, TxRequest, now
from tx.tinker.store.database import reading, writing
from tx.tinker.types import TinkerError, UserError, error_text

CHECK_INTERVAL_SEC = 0.25  # between checks for cancelled requests
MAX_SHARED_TRIES, MAX_TRIES = 2, 3  # alongside other requests, and in total

T = TypeVar("T")
Also = Callable[[Session], object]


class PendingRequest(NamedTuple):
    """A request that has not started."""

    request_id: int
    kind: Kind
    model_id: str | None
    session_id: str | None
    owner: str
    n_tries: int  # engines that died while it was running

    @property
    def is_suspect(self) -> bool:
        """True if it must run alone."""
        return self.n_tries >= MAX_SHARED_TRIES


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of a request."""

    request_id: int
    result: bytes | None = None
    is_protobuf: bool = False
    error: Exception | None = None
    also: Also | None = None  # more changes to commit together with it


@dataclass(slots=True)
class Queue:
    """Requests from the database, until their outcomes are written back.

    Requests wait if this engine does not have their model: because its base model differs, or it could not be restored.
    """

    database: Database
    base_model: str
    kinds: Collection[Kind] = tuple(Kind)
    counts_tries: bool = True
    """True if this process's death counts against the requests that it was running."""
    by_model: dict[str, deque[PendingRequest]] = field(default_factory=dict)
    samples: dict[str, dict[str, deque[PendingRequest]]] = field(default_factory=dict)  # by user, then by session
    suspects: deque[PendingRequest] = field(default_factory=deque)  # samples
    begun: set[int] = field(default_factory=set)
    _last: int = 0
    _has_news: bool = False  # a request may have been cancelled
    _checked_at: float = 0.0

    def fetch(self) -> int:
        """Fetch new requests and return their number. Request numbers become visible in ascending order."""
        self._has_news = True
        columns = tuple(getattr(TxRequest, name) for name in PendingRequest._fields)
        is_elsewhere = (col(Model.base_model) != self.base_model) | col(Model.lost_because).is_not(None)
        is_new = (
            TxRequest.status == RequestStatus.PENDING,
            col(TxRequest.request_id) > self._last,
            col(TxRequest.kind).in_(self.kinds),
        )
        with reading(self.database) as session:
            elsewhere = select(Model.model_id).where(Model.model_id == TxRequest.model_id, is_elsewhere)
            query = select(*columns).where(*is_new, ~elsewhere.exists())
            new = [PendingRequest(*row) for row in session.exec(query.order_by(col(TxRequest.request_id)))]
        for pending in new:
            self._last = pending.request_id
            if pending.kind != Kind.SAMPLE:
                self.by_model.setdefault(pending.model_id or "", deque()).append(pending)
            elif pending.is_suspect and self.counts_tries:
                self.suspects.append(pending)
            else:
                sessions = self.samples.setdefault(pending.owner, {})
                sessions.setdefault(pending.session_id or "", deque()).append(pending)
        return len(new)

    # -- begin

    def heads(self, busy: Collection[str]) -> list[PendingRequest]:
        """Return the next request of every model that is not busy."""
        return [waiting[0] for model_id, waiting in self.by_model.items() if model_id not in busy]

    def next_suspect(self, busy: Collection[str]) -> PendingRequest | None:
        """Return a request that must run alone, or None."""
        suspects = [head for head in self.heads(busy) if head.is_suspect]
        return suspects[0] if suspects else self.suspects[0] if self.suspects else None

    def next_samples(self, n_free: int, running_by_owner: Mapping[str, int]) -> list[PendingRequest]:
        """Return samples to start. Users take turns, as do a user's sessions.

        No user may run more samples than slots remain free, so that there is room for later users. With 512 slots, a
        single user stops at 256: 256 running, 256 free. A second user then gets 128, half of the rest. As the first
        user's samples end, both settle at 170 or 171, a third of the slots each.
        """
        chosen: list[PendingRequest] = []
        running = Counter(running_by_owner)
        while True:
            owner = next((user for user in self.samples if running[user] < n_free - len(chosen)), None)
            if owner is None:
                return chosen
            sessions = self.samples.pop(owner)
            session_id, waiting = pop_next(sessions)
            chosen.append(waiting.popleft())
            running[owner] += 1
            if waiting:
                sessions[session_id] = waiting  # to the end of the turn order
            if sessions:
                self.samples[owner] = sessions

    def begin(self, chosen: Sequence[PendingRequest]) -> list[TxRequest]:
        """Take requests from the queue and count a try. Return them with payloads, except those cancelled meanwhile."""
        if not chosen:
            return []
        for pending in chosen:
            if pending.kind == Kind.SAMPLE:
                if self.suspects and self.suspects[0] is pending:
                    self.suspects.popleft()
                continue
            queue = self.by_model[pending.model_id or ""]
            assert queue[0] is pending, "the requests of a model must begin in order"
            queue.popleft()
            if not queue:
                del self.by_model[pending.model_id or ""]
        ids = [pending.request_id for pending in chosen]
        waiting = (col(TxRequest.request_id).in_(ids), col(TxRequest.status) == RequestStatus.PENDING)
        n_new_tries = int(self.counts_tries)
        with writing(self.database) as session:
            session.exec(update(TxRequest).where(*waiting).values(n_tries=col(TxRequest.n_tries) + n_new_tries))
            found = select(TxRequest).where(*waiting).options(defer(col(TxRequest.result)))  # type: ignore[arg-type]
            requests = list(session.exec(found.order_by(col(TxRequest.request_id))))
        self.begun.update(request.request_id or 0 for request in requests)
        if n_new_tries and not self.counts_tries:  # `prepare_stop` was called meanwhile
            self._forget_tries()
        return requests

    # -- end

    def find_cancelled(self) -> set[int]:
        """Return running requests that were cancelled. Checked after `fetch`, but not too often."""
        if not self.begun:
            self._has_news = False  # fetched requests have not started yet
        if not self._has_news or time.monotonic() - self._checked_at < CHECK_INTERVAL_SEC:
            return set()
        self._has_news, self._checked_at = False, time.monotonic()
        with reading(self.database) as session:
            is_cancelled = (col(TxRequest.request_id).in_(self.begun), col(TxRequest.status) == RequestStatus.CANCELLED)
            return set(session.exec(select(TxRequest.request_id).where(*is_cancelled)))  # type: ignore[arg-type]

    def drop(self, request_id: int) -> None:
        """Drop a running request without an outcome."""
        self.begun.discard(request_id)

    def finish(self, outcomes: Iterable[RequestOutcome]) -> None:
        """Write outcomes. Requests that were cancelled meanwhile stay cancelled."""
        written = list(outcomes)
        is_pending = col(TxRequest.status) == RequestStatus.PENDING
        with writing(self.database) as session:
            for outcome in written:
                columns: dict[str, object] = {"status": RequestStatus.DONE, "completed_at": now()}
                if outcome.error is None:
                    columns |= {"result": outcome.result, "is_result_protobuf": outcome.is_protobuf}
                else:
                    category = "user" if isinstance(outcome.error, UserError) else "server"
                    columns |= {"status": RequestStatus.FAILED, "error": error_text(outcome.error)}
                    columns["error_category"] = category
                is_it = col(TxRequest.request_id) == outcome.request_id
                session.exec(update(TxRequest).where(is_it, is_pending).values(columns))
                if outcome.also is not None:
                    outcome.also(session)
        self.begun.difference_update(outcome.request_id for outcome in written)

    def prepare_stop(self) -> None:
        """Stop counting tries, so that a kill during shutdown makes no request suspect. Any thread may call this."""
        self.counts_tries = False
        self._forget_tries()

    def release_running(self) -> None:
        """Release running requests on a regular shutdown, so that they do not become suspect."""
        self._forget_tries()
        self.begun.clear()

    def _forget_tries(self) -> None:
        with writing(self.database) as session:
            session.exec(update(TxRequest).where(col(TxRequest.request_id).in_(list(self.begun))).values(n_tries=0))


def pop_next(turns: dict[str, T]) -> tuple[str, T]:
    """Pop the first entry of whoever is next. Return (owner, entry)."""
    key = next(iter(turns))
    return key, turns.pop(key)


def give_up(pending: PendingRequest) -> RequestOutcome | None:
    """Return the failed outcome of a request that was running each time an engine died, or None for all others."""
    if pending.n_tries < MAX_TRIES:
        return None

    def fail_creation(session: Session) -> None:
        model = None if pending.model_id is None else session.get(Model, pending.model_id)
        if model is not None and model.status is ModelStatus.PENDING:
            model.status = ModelStatus.FAILED

    message = f"the engine died {pending.n_tries} times during this request, the last time while it ran alone"
    error = TinkerError(f"{message}; the server's log has the reason")
    return RequestOutcome(pending.request_id, error=error, also=fail_creation)
