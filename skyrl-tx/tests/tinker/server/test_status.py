from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine as Database
from tx_kit.rows import add_rows, model_row, request_row

from tx.tinker.db_models import ClientSession, Kind, ModelStatus, RequestStatus, SessionStatus, TxRequest, now
from tx.tinker.server.status import RequestCounts, Status, query_status
from tx.tinker.store.database import open_database, reading


@pytest.fixture
def database(each_database_url: str) -> Iterator[Database]:
    """The data of three users, one of whom has left."""
    opened = open_database(each_database_url)
    for owner in ("alice", "bob", "carol"):
        has_left = owner == "carol"
        status = SessionStatus.FINISHED if has_left else SessionStatus.ACTIVE
        model = model_row(owner, status=ModelStatus.UNLOADED if has_left else ModelStatus.READY)
        add_rows(opened, ClientSession(session_id=owner, owner=owner, status=status), model)
    add_rows(opened, *requests())
    yield opened
    opened.dispose()


def requests() -> Iterator[TxRequest]:
    def one(owner: str, seconds: float, **fields: Any) -> TxRequest:
        done = now() - timedelta(seconds=1)
        defaults = {"status": RequestStatus.DONE, "completed_at": done, "created_at": done - timedelta(seconds=seconds)}
        defaults |= {"kind": Kind.OPTIM_STEP, "model_id": f"{owner}:train:0"}
        return request_row(owner=owner, **(defaults | fields))

    yield one("alice", 1.0)
    yield one("alice", 2.5)
    yield one("bob", 4.0)
    yield one("bob", 0, status=RequestStatus.PENDING, completed_at=None)
    yield one("bob", 0, kind=Kind.SAMPLE, model_id=None, status=RequestStatus.PENDING, completed_at=None)
    yield one("bob", 2.0, kind=Kind.SAMPLE, model_id=None, status=RequestStatus.FAILED, error="of bob")
    yield one("alice", 0, status=RequestStatus.FAILED, error="of alice", completed_at=now() - timedelta(hours=1))
    yield one("alice", 9.0, status=RequestStatus.CANCELLED)


def seen(database: Database, owner: str | None = None) -> Status:
    with reading(database) as db:
        return query_status(db, "m", owner)


def test_pending_and_finished_requests(database: Database) -> None:
    found = seen(database)
    assert found.by_kind == {
        Kind.OPTIM_STEP: RequestCounts(1, 3, pytest.approx(2.5, abs=1e-3)),
        Kind.SAMPLE: RequestCounts(1, 1, pytest.approx(2.0, abs=1e-3)),
    }
    assert found.by_model["bob:train:0"] == RequestCounts(1, 1, pytest.approx(4.0, abs=1e-3))
    assert found.by_model["alice:train:0"] == RequestCounts(0, 2, pytest.approx(1.75, abs=1e-3))
    assert (found.n_models, found.n_sessions) == (2, 2)
    assert [one.error for one in found.errors] == ["of bob", "of alice"]
