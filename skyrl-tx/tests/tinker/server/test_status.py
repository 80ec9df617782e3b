from datetime import timedelta
from typing import Any

import pytest
from tx_kit.rows import add_rows, model_row, request_row

from tx.tinker.db_models import ClientSession, Kind, ModelStatus, RequestStatus, SessionStatus, now
from tx.tinker.server.status import RequestCounts, query_status
from tx.tinker.store.database import open_database, reading


def test_pending_and_finished_requests(each_database_url: str) -> None:
    """Of three users, one of whom has left."""
    database = open_database(each_database_url)
    for owner in ("alice", "bob", "carol"):
        has_left = owner == "carol"
        status = SessionStatus.FINISHED if has_left else SessionStatus.ACTIVE
        model = model_row(owner, status=ModelStatus.UNLOADED if has_left else ModelStatus.READY)
        add_rows(database, ClientSession(session_id=owner, owner=owner, status=status), model)
    done_at = now() - timedelta(seconds=1)

    def add(owner: str, seconds: float, **fields: Any) -> None:
        defaults = {"completed_at": done_at, "created_at": done_at - timedelta(seconds=seconds), "owner": owner}
        defaults |= {"kind": Kind.OPTIM_STEP, "model_id": f"{owner}:train:0", "status": RequestStatus.DONE}
        add_rows(database, request_row(**(defaults | fields)))

    pending: dict[str, Any] = {"status": RequestStatus.PENDING, "completed_at": None}
    sample: dict[str, Any] = {"kind": Kind.SAMPLE, "model_id": None}
    add("alice", 1.0)
    add("alice", 2.5)
    add("bob", 4.0)
    add("bob", 0, **pending)
    add("bob", 0, **sample, **pending)
    add("bob", 2.0, **sample, status=RequestStatus.FAILED, error="of bob")
    add("alice", 0, status=RequestStatus.FAILED, error="of alice", completed_at=now() - timedelta(hours=1))
    add("alice", 9.0, status=RequestStatus.CANCELLED)
    with reading(database) as db:
        found = query_status(db, "m", None)
    assert found.by_kind == {
        Kind.OPTIM_STEP: RequestCounts(1, 3, pytest.approx(2.5, abs=1e-3)),
        Kind.SAMPLE: RequestCounts(1, 1, pytest.approx(2.0, abs=1e-3)),
    }
    assert found.by_model["bob:train:0"] == RequestCounts(1, 1, pytest.approx(4.0, abs=1e-3))
    assert found.by_model["alice:train:0"] == RequestCounts(0, 2, pytest.approx(1.75, abs=1e-3))
    assert (found.n_models, found.n_sessions) == (2, 2)
    assert [one.error for one in found.errors] == ["of bob", "of alice"]
    database.dispose()
