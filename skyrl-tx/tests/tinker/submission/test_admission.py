from typing import Any

import pytest
from sqlalchemy import Engine as Database
from tx_kit.rows import change_row, request_row

from tx.tinker.db_models import RequestStatus, TxRequest
from tx.tinker.refusal import RefusalError
from tx.tinker.store.database import writing
from tx.tinker.submission import admission as module
from tx.tinker.submission.admission import Admission, QueueLimits

UNLIMITED = QueueLimits(10**9, 10**12)


@pytest.fixture(autouse=True)
def _always_recounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOUNT_SEC", 0.0)


def admission_of(max_requests: int, max_bytes: int, user: QueueLimits = UNLIMITED) -> Admission:
    return Admission(QueueLimits(max_requests, max_bytes), user)


def accept(database: Database, admission: Admission, **fields: Any) -> int:
    request = request_row(**{"payload": b"12345678", **fields})
    with writing(database) as db:
        admission.admit(db, request)
        db.add(request)
    assert request.request_id is not None
    return request.request_id


def finish(database: Database, request_id: int) -> None:
    change_row(database, TxRequest, request_id, status=RequestStatus.DONE)


def test_the_number_of_requests_is_limited(database: Database) -> None:
    admission = admission_of(3, 1000)
    ids = [accept(database, admission) for _ in range(3)]
    with pytest.raises(RefusalError, match="3 requests of the base model are pending") as refused:
        accept(database, admission)
    assert refused.value.status == 429
    finish(database, ids[1])
    accept(database, admission)
    with pytest.raises(RefusalError):
        accept(database, admission)


def test_queues_are_independent(database: Database) -> None:
    admission = admission_of(1, 1000)
    for queue in ({}, {"owner": "other"}, {"model_id": "a"}, {"sampling_session_id": "b"}):
        accept(database, admission, **queue)
        with pytest.raises(RefusalError):
            accept(database, admission, **queue)


def test_each_user_has_limits_over_all_queues(database: Database) -> None:
    admission = admission_of(100, 1000, user=QueueLimits(3, 30))
    first = accept(database, admission, model_id="a")
    accept(database, admission, model_id="b")
    with pytest.raises(RefusalError, match="requests of this user with 16 bytes are pending"):
        accept(database, admission, model_id="c", payload=bytes(20))
    accept(database, admission, sampling_session_id="d")
    with pytest.raises(RefusalError, match="3 requests of this user are pending, which is the limit") as refused:
        accept(database, admission, model_id="e")
    assert refused.value.status == 429
    accept(database, admission, model_id="e", owner="other")
    finish(database, first)
    accept(database, admission, model_id="e")


def test_the_size_of_requests_is_limited(database: Database) -> None:
    admission = admission_of(100, 20)
    first = accept(database, admission, payload=bytes(30))  # a single request is never too large
    with pytest.raises(RefusalError, match="30 bytes are pending"):
        accept(database, admission)
    finish(database, first)
    for _ in range(2):
        accept(database, admission)
    with pytest.raises(RefusalError, match="16 bytes"):
        accept(database, admission)


def test_pending_requests_are_counted_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOUNT_SEC", 600.0)
    counted: list[object] = []
    count = module._count
    monkeypatch.setattr(module, "_count", lambda db, queue: counted.append(queue) or count(db, queue))
    admission = admission_of(50, 10_000)
    for _ in range(50):
        accept(database, admission)
    for _ in range(10):
        with pytest.raises(RefusalError):
            accept(database, admission)
    assert len(counted) == 2  # of the queue and the user


def test_the_least_recently_used_count_is_evicted_first(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached counts only: the requests are not written to the database."""
    monkeypatch.setattr(module, "MAX_QUEUES", 3)  # of two models and the user
    monkeypatch.setattr(module, "RECOUNT_SEC", 600.0)
    admission = admission_of(2, 1000)

    def admit(model_id: str) -> None:
        with writing(database) as db:
            admission.admit(db, request_row(model_id=model_id))

    for model_id in ("a", "a", "b", "c", "c"):
        admit(model_id)
    with pytest.raises(RefusalError):
        admit("c")
    admit("a")
