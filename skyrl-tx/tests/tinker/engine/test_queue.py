from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine as Database
from tx_kit.rows import add_rows, change_row, read_rows, request_row

from tx.tinker.db_models import ClientSession, Kind, RequestStatus, TxRequest
from tx.tinker.engine import queue as queues
from tx.tinker.engine.queue import Queue, RequestOutcome, give_up
from tx.tinker.types import UserError


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database, "m")


def put(database: Database, kind: Kind = Kind.SAMPLE, **fields: Any) -> int:
    """Add a request; return its number."""
    add_rows(database, request_row(kind, **fields))
    return read_rows(database, TxRequest)[-1].request_id or 0


def begin(queue: Queue) -> list[int]:
    """Fetch requests and begin samples; return their numbers."""
    queue.fetch()
    return [one.request_id or 0 for one in queue.begin(queue.next_samples(9, {}))]


def cancel(database: Database, request_id: int) -> None:
    change_row(database, TxRequest, request_id, status=RequestStatus.CANCELLED)


def test_each_request_begins_once(database: Database, queue: Queue) -> None:
    put(database, status=RequestStatus.DONE)
    first = put(database)
    assert queue.fetch() == 1
    second = put(database)
    assert (queue.fetch(), queue.fetch()) == (1, 0)
    assert [one.request_id for one in queue.next_samples(9, {})] == [first, second]


def test_requests_of_a_model_are_in_order(database: Database, queue: Queue) -> None:
    ids = {name: [put(database, Kind.OPTIM_STEP, model_id=name) for _ in range(2)] for name in "ab"}
    queue.fetch()
    heads = queue.heads(busy=())
    assert [head.request_id for head in heads] == [ids["a"][0], ids["b"][0]]
    assert [head.request_id for head in queue.heads(busy={"a"})] == [ids["b"][0]]
    (begun,) = queue.begin([heads[0]])
    assert (begun.request_id, begun.payload) == (ids["a"][0], b"p")
    assert [head.request_id for head in queue.heads(busy=())] == [ids["a"][1], ids["b"][0]]


def test_requests_cancelled_while_pending_do_not_begin(database: Database, queue: Queue) -> None:
    cancelled = put(database, Kind.FORWARD_BACKWARD, model_id="a")
    stays = put(database, Kind.FORWARD_BACKWARD, model_id="b")
    queue.fetch()
    cancel(database, cancelled)
    assert [one.request_id for one in queue.begin(queue.heads(busy=()))] == [stays]
    assert queue.heads(busy=()) == []
    assert queue.begun == {stays}


def test_users_take_turns(database: Database, queue: Queue) -> None:
    for session_id in ("a", "b", None):
        for _ in range(2):
            put(database, session_id=session_id, owner="many")
    for _ in range(2):
        put(database, owner="few")
    queue.fetch()
    order = [(one.owner, one.session_id) for one in queue.next_samples(99, {})[:7]]
    assert order[:4] == [("many", "a"), ("few", None), ("many", "b"), ("few", None)]
    assert order[4:] == [("many", None), ("many", "a"), ("many", "b")]


def test_no_user_takes_more_than_remains_free(database: Database, queue: Queue) -> None:
    for owner in ("many", "too", "many", "too") * 8:
        put(database, owner=owner)
    queue.fetch()
    n_running: Counter[str] = Counter()

    def begin(n_free: int) -> list[str]:
        owners = [one.owner for one in queue.next_samples(n_free - n_running.total(), n_running)]
        n_running.update(owners)
        return owners

    assert begin(9) == ["many", "too"] * 3
    put(database, owner="late")
    queue.fetch()
    assert begin(9) == ["late"]
    n_running.subtract(["too"])
    assert begin(9) == ["too"]


def test_running_requests_can_be_cancelled(database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "CHECK_INTERVAL_SEC", 0.0)
    ids = [put(database) for _ in range(3)]
    queue.fetch()
    assert queue.find_cancelled() == set()
    queue.begin(queue.next_samples(3, {}))
    for request_id in ids[1:]:
        cancel(database, request_id)
    assert queue.find_cancelled() == set()  # the server has not rung
    queue.fetch()
    assert queue.find_cancelled() == {ids[1]}  # the third has not begun
    queue.drop(ids[1])
    queue.fetch()
    assert queue.find_cancelled() == set()


def test_cancellations_are_checked_at_intervals(
    database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "CHECK_INTERVAL_SEC", 3600.0)
    clock = iter([10_000.0, 10_000.0, 13_599.0, 13_600.0, 13_600.0])
    monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    request_id = put(database)
    begin(queue)
    queue.fetch()
    assert queue.find_cancelled() == set()
    cancel(database, request_id)
    queue.fetch()
    assert queue.find_cancelled() == set()  # after 3599 s
    assert queue.find_cancelled() == {request_id}  # after 3600 s


def test_outcomes_are_written_together(database: Database, queue: Queue) -> None:
    done, wrong, bug, cancelled = (put(database) for _ in range(4))
    begin(queue)
    cancel(database, cancelled)
    queue.finish(
        [
            RequestOutcome(done, b"result", is_protobuf=True, also=lambda db: db.add(ClientSession(session_id="new"))),
            RequestOutcome(wrong, error=UserError("no")),
            RequestOutcome(bug, error=ZeroDivisionError("1 / 0")),
            RequestOutcome(cancelled, b"late"),
        ]
    )
    found = read_rows(database, TxRequest)
    assert [one.status.value for one in found] == ["done", "failed", "failed", "cancelled"]
    assert (found[0].result, found[0].is_result_protobuf) == (b"result", True)
    errors = [(one.error, one.error_category) for one in found[1:3]]
    assert errors == [("no", "user"), ("ZeroDivisionError: 1 / 0", "server")]
    assert found[3].result is None
    assert queue.begun == set()
    assert [one.session_id for one in read_rows(database, ClientSession)] == ["new"]
    late = put(database)
    begin(queue)
    with pytest.raises(ZeroDivisionError):
        queue.finish([RequestOutcome(late, b"result", also=lambda _: 1 / 0)])
    assert read_rows(database, TxRequest)[-1].status is RequestStatus.PENDING


@pytest.mark.parametrize(
    ("message", "expected"),
    [("a\0b", "ValueError: a\\0b"), ("\udc80", "ValueError: \\udc80"), ("x" * 5000, "ValueError: " + "x" * 1988)],
)
def test_error_messages_of_libraries_are_stored(database: Database, queue: Queue, message: str, expected: str) -> None:
    queue.finish([RequestOutcome(put(database), error=ValueError(message))])
    assert read_rows(database, TxRequest)[0].error == expected


def test_requests_released_on_shutdown_are_not_suspect(database: Database, queue: Queue) -> None:
    request_id = put(database)
    assert begin(queue) == [request_id]
    assert read_rows(database, TxRequest)[0].n_tries == 1
    queue.release_running()
    assert read_rows(database, TxRequest)[0].n_tries == 0
    again = Queue(database, "m")
    assert begin(again) == [request_id]
    again.prepare_stop()
    put(database)
    begin(again)  # between the request to stop and the end
    assert len(again.begun) == 2
    assert {one.n_tries for one in read_rows(database, TxRequest)} == {0}  # and then the engine is killed


def test_suspects_run_alone_and_are_then_given_up(database: Database) -> None:
    sample, step = put(database), put(database, Kind.OPTIM_STEP, model_id="a")
    for n_tries in range(3):
        engine = Queue(database, "m")
        engine.fetch()
        suspect = engine.next_suspect(busy=())
        if n_tries < 2:
            assert suspect is None
            engine.begin([*engine.heads(busy=()), *engine.next_samples(9, {})])
    assert suspect is not None
    assert suspect.request_id == step
    assert engine.next_samples(9, {}) == []
    assert give_up(suspect) is None
    engine.begin([suspect])
    last = Queue(database, "m")
    last.fetch()
    dead = last.next_suspect(busy=())
    assert dead is not None
    outcome = give_up(dead)
    assert outcome is not None
    assert "the engine died 3 times during this request" in str(outcome.error)
    last.begin([dead])
    next_suspect = last.next_suspect(busy=())
    assert next_suspect is not None
    assert next_suspect.request_id == sample
    assert [one.request_id for one in last.begin([next_suspect])] == [sample]
    assert last.next_suspect(busy=()) is None
