"""All tests run on both databases, except for those of SQLite's settings."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import BigInteger, Engine, Integer, text
from sqlalchemy.exc import StatementError
from sqlmodel import SQLModel, func, select
from tx_kit.processes import start_python
from tx_kit.rows import add_rows, checkpoint_row, model_row, read_rows, request_row

from tx.tinker.db_models import Checkpoint, Model, TxRequest, now
from tx.tinker.db_models import ClientSession as ClientSession
from tx.tinker.store.database import open_database, reading, writing


@pytest.fixture
def database(each_database_url: str) -> Iterator[Engine]:
    opened = open_database(each_database_url)
    yield opened
    opened.dispose()


def _differ(_: object, __: object, ___: object, inspected: object, expected: object) -> bool:
    """Return whether types differ; the database may use larger integers."""
    return not isinstance(inspected, BigInteger | Integer) and None  # type: ignore[return-value]


def session(session_id: str, **fields: Any) -> ClientSession:
    return ClientSession(session_id=session_id, **fields)


def test_migrations_match_the_models(database: Engine) -> None:
    with database.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": _differ})
        assert compare_metadata(context, SQLModel.metadata) == []


def test_times_have_a_zone(database: Engine) -> None:
    elsewhere = datetime(2026, 3, 29, 3, 30, 0, 123456, timezone(timedelta(hours=5, minutes=30)))
    add_rows(database, session("a", created_at=elsewhere))
    with reading(database) as db:
        found = db.exec(select(ClientSession).where(ClientSession.created_at <= elsewhere)).one()
        assert not db.exec(select(ClientSession).where(ClientSession.created_at < elsewhere)).all()
    assert found.created_at == elsewhere
    assert found.created_at.tzinfo is UTC
    assert abs(now() - found.last_seen_at) < timedelta(minutes=1)


def test_large_numbers(database: Engine) -> None:
    large = 1 << 40  # bytes of a checkpoint, or number of requests
    request = request_row(request_id=large, sample_seq_id=large)
    add_rows(database, session("s"), model_row(restored_until=large), checkpoint_row(size_bytes=large), request)
    assert [one.size_bytes for one in read_rows(database, Checkpoint)] == [large]
    assert [one.sample_seq_id for one in read_rows(database, TxRequest)] == [large]
    assert [one.restored_until for one in read_rows(database, Model)] == [large]


def test_a_time_without_a_zone_is_refused_and_all_changes_are_rolled_back(database: Engine) -> None:
    with pytest.raises(StatementError, match="must have timezone information"):
        add_rows(database, session("a"), session("b", created_at=datetime(2026, 1, 1)))
    assert read_rows(database, ClientSession) == []


@pytest.mark.parametrize("each_database_url", ["sqlite"], indirect=True)
def test_some_commits_of_sqlite_are_durable(database: Engine) -> None:
    found = []
    for is_durable in (False, True, False):
        with writing(database, is_durable=is_durable) as db:
            found.append(db.connection().execute(text("PRAGMA synchronous")).scalar())
    assert found == [1, 2, 1]  # NORMAL, FULL


def test_readers_see_a_snapshot(database: Engine) -> None:
    add_rows(database, session("a"))
    with reading(database) as db:
        n_before = db.exec(select(func.count()).select_from(ClientSession)).one()
        with writing(database) as other:
            other.add(session("b"))
        assert db.exec(select(func.count()).select_from(ClientSession)).one() == n_before == 1
    with reading(database) as db:
        assert db.get(ClientSession, "b") is not None


def test_writers_wait_for_each_other(database: Engine, each_database_url: str) -> None:
    others = [open_database(each_database_url) for _ in range(3)]

    def write(engine: Engine, name: str) -> None:
        for number in range(20):
            with writing(engine) as db:
                n_before = db.exec(select(func.count()).select_from(ClientSession)).one()
                db.add(session(f"{name}-{number}", display_name=str(n_before)))

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, [database, *others], "abcd"))
    with reading(database) as db:
        seen = sorted(int(one.display_name or -1) for one in db.exec(select(ClientSession)))
    assert seen == list(range(80))  # none has read what another was about to change
    for other in others:
        other.dispose()


def test_concurrent_processes_can_open_a_new_database(each_database_url: str) -> None:
    program = "import sys; from tx.tinker.store.database import open_database; open_database(sys.argv[1]).dispose()"
    children = [start_python("-c", program, each_database_url) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
