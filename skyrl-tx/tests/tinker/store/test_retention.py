from datetime import timedelta

import pytest
from sqlalchemy import Engine as Database
from tx_kit.rows import add_rows, read_rows, request_row

from tx.tinker.db_models import RequestStatus, TxRequest, now
from tx.tinker.store import retention
from tx.tinker.store.database import writing

OLD = now() - timedelta(days=3)


def test_old_requests_are_deleted_in_batches(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deletion blocks other writers."""
    monkeypatch.setattr(retention, "MAX_ROWS", 2)
    add_rows(database, *(request_row(status=RequestStatus.DONE, completed_at=OLD) for _ in range(5)))
    n_deleted = []
    for _ in range(4):
        with writing(database) as db:
            n_deleted.append(retention.delete_requests(db, 1.0))
    assert n_deleted == [2, 2, 1, 0]
    assert read_rows(database, TxRequest) == []
