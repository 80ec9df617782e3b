from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine as Database
from sqlmodel import Session as Db
from tx_kit.rows import add_rows, change_row, checkpoint_row, model_row

from tx.tinker.db_models import Checkpoint, CheckpointKind, ClientSession, SessionStatus, now
from tx.tinker.store import catalog
from tx.tinker.store.database import reading
from tx.tinker.types import UserError
from tx.tinker.wire.listings import SearchSessionsRequest

START = datetime(2026, 1, 1, tzinfo=UTC)
ALL = tuple(CheckpointKind)


@pytest.fixture
def db(database: Database) -> Iterator[Db]:
    """Sessions a0 … a3 and b0 of two users, with a model and checkpoints in each."""
    for number, name in enumerate(("a0", "a1", "a2", "a3", "b0")):
        at = START + timedelta(hours=number)
        model = model_row(name, rank=number % 2 * 4, last_request_at=at)
        add_rows(database, session(name, number), model)
        for minute, kind in enumerate((CheckpointKind.TRAINING, CheckpointKind.SAMPLER)):
            fields = {"kind": kind, "size_bytes": 1 << 40, "created_at": at + timedelta(minutes=minute)}
            add_rows(database, checkpoint_row(model.model_id, "c", **fields))
    with reading(database) as opened:
        yield opened


def session(name: str, number: int) -> ClientSession:
    return ClientSession(
        session_id=name,
        owner=name[0],
        project_id="p" if number < 2 else None,
        display_name=f"Run {number} of 100%",
        user_metadata={"number": number, "all": "yes"},
        status=(SessionStatus.ACTIVE, SessionStatus.FINISHED, SessionStatus.EXPIRED)[number % 3],
        end_reason=(None, "errored: out of luck", "timed out")[number % 3],
        created_at=START + timedelta(hours=number // 2),  # some at the same time
    )


def search(db: Db, **query: Any) -> list[str]:
    found = catalog.search_sessions(db, "a", SearchSessionsRequest.model_validate(query))
    return [one.session_id for one in found.sessions]


def test_runs(db: Db) -> None:
    found = catalog.list_training_runs(db, "a", None, limit=2, offset=1)
    assert [one.training_run_id for one in found.training_runs] == ["a2:train:0", "a1:train:0"]
    assert found.cursor.total_count == 4
    second = found.training_runs[1]
    assert (second.is_lora, second.lora_rank, found.training_runs[0].is_lora) == (True, 4, False)
    assert second.last_checkpoint is not None
    assert second.last_checkpoint.tinker_path == "tinker://a1:train:0/weights/c"
    assert second.last_request_time.tzinfo is not None
    in_project = catalog.list_training_runs(db, "a", "p", limit=9, offset=0)
    assert [one.training_run_id for one in in_project.training_runs] == ["a1:train:0", "a0:train:0"]


def test_checkpoints(db: Db, database: Database) -> None:
    found = catalog.list_checkpoints(db, "a", ALL, limit=3, offset=0)
    assert [one.checkpoint_id for one in found.checkpoints] == ["sampler_weights/c", "weights/c", "sampler_weights/c"]
    assert (found.cursor.total_count, found.checkpoints[0].size_bytes) == (8, 1 << 40)
    only = catalog.list_checkpoints(db, "b", (CheckpointKind.TRAINING,), limit=9, offset=0)
    assert [one.tinker_path for one in only.checkpoints] == ["tinker://b0:train:0/weights/c"]
    change_row(database, Checkpoint, ("b0:train:0", "weights", "c"), expires_at=now())
    with reading(database) as again:
        left = catalog.list_checkpoints(again, "b", ALL, limit=9, offset=0)
        assert [one.checkpoint_type for one in left.checkpoints] == ["sampler"]
        assert len(catalog.checkpoints_of(again, ["b0:train:0"])) == 1


def test_sessions(db: Db) -> None:
    assert catalog.list_sessions(db, "a", limit=9, offset=0).sessions == ["a2", "a3", "a0", "a1"]
    assert catalog.list_sessions(db, "a", limit=1, offset=2).sessions == ["a0"]
    info = catalog.session_info(db, db.get_one(ClientSession, "a1"))
    assert (info.training_run_ids, info.user_metadata) == (["a1:train:0"], {"number": "1", "all": "yes"})


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, "a3 a2 a1 a0"),
        ({"session_id": "a1"}, "a1"),
        ({"session_id": "b0"}, ""),
        ({"project_ids": ["p", "q"]}, "a1 a0"),
        ({"display_name": "run 2"}, "a2"),
        ({"display_name": "100% RUN"}, "a3 a2 a1 a0"),
        ({"display_name": "%"}, "a3 a2 a1 a0"),
        ({"display_name": "_"}, ""),
        ({"display_name": "2", "session_id": "a0"}, "a2 a0"),
        ({"user_metadata": {"number": "3", "all": "yes"}}, "a3"),
        ({"user_metadata": {"number": "3", "all": "no"}}, ""),
        ({"statuses": [{"type": "active"}]}, "a3 a0"),
        ({"statuses": [{"type": "client_finished", "reasons": ["errored"]}]}, "a1"),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, ""),
        ({"statuses": [{"type": "client_finished", "reasons": []}]}, ""),
        ({"statuses": [{"type": "cancelled"}, {"type": "failed"}]}, "a2"),
    ],
)
def test_searching(db: Db, query: dict[str, Any], found: str) -> None:
    assert search(db, **query) == found.split()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(st.integers(1, 5))
def test_pages_contain_each_session_once(db: Db, limit: int) -> None:
    seen: list[str] = []
    cursor = None
    while True:
        query = SearchSessionsRequest.model_validate({"limit": limit, "cursor": cursor})
        page = catalog.search_sessions(db, "a", query)
        seen += [one.session_id for one in page.sessions]
        if page.next_cursor is None:
            break
        cursor = page.next_cursor.model_dump(mode="json")
    assert seen == ["a3", "a2", "a1", "a0"]


def test_cursor_times(db: Db) -> None:
    for time in ("2026-01-01T01:00:00", "2026-01-01T06:30:00+05:30"):  # without a zone, in UTC
        assert search(db, cursor={"last_created_at": time, "last_session_id": "a2"}) == ["a1", "a0"]
    with pytest.raises(UserError, match="is out of range"):
        search(db, cursor={"last_created_at": "0001-01-01T00:00:00+12:00", "last_session_id": "x"})


def test_names_with_too_many_words(db: Db) -> None:
    assert search(db, display_name="run " * 1000) == ["a3", "a2", "a1", "a0"]
    with pytest.raises(UserError, match="display_name has 65 words"):
        search(db, display_name=" ".join(str(number) for number in range(65)))
