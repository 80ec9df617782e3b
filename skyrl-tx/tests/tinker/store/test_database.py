"""All tests run on both databases, except for those of SQLite's settings."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import BigInteger, Engine, Integer, text
from sqlalchemy.exc import StatementError
from sqlmodel import SQLModel, func, select
from tx_kit.databases import database_url
from tx_kit.servers import CHILD_ENVIRONMENT

from tx.tinker.db_models import Checkpoint, CheckpointKind, Kind, Model, Request, now
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.store.database import open_database, reading, writing


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/folder/tinker.db"
    return database_url(request.getfixturevalue("postgresql_url"), secrets.token_hex(8))


@pytest.fixture
def database(url: str) -> Iterator[Engine]:
    opened = open_database(url)
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


def test_opening_again_changes_nothing(database: Engine, url: str) -> None:
    with writing(database) as db:
        db.add(ClientSession(session_id="a"))
    again = open_database(url)
    with reading(again) as db:
        assert [one.session_id for one in db.exec(select(ClientSession))] == ["a"]
    again.dispose()


def test_times_have_a_zone(database: Engine) -> None:
    elsewhere = datetime(2026, 3, 29, 3, 30, 0, 123456, timezone(timedelta(hours=5, minutes=30)))
    with writing(database) as db:
        db.add(session("a", created_at=elsewhere))
    with reading(database) as db:
        found = db.exec(select(ClientSession).where(ClientSession.created_at <= elsewhere)).one()
        assert not db.exec(select(ClientSession).where(ClientSession.created_at < elsewhere)).all()
    assert found.created_at == elsewhere
    assert found.created_at.tzinfo is UTC
    assert abs(now() - found.last_seen_at) < timedelta(minutes=1)


def test_a_time_without_a_zone_is_refused(database: Engine) -> None:
    def write() -> None:
        with writing(database) as db:
            db.add(session("a", created_at=datetime(2026, 1, 1)))

    with pytest.raises(StatementError, match="must have timezone information"):
        write()


def test_large_numbers(database: Engine) -> None:
    large = 1 << 40  # bytes of a checkpoint, or number of requests
    fields = {"kind": CheckpointKind.TRAINING, "base_model": "m", "lora": {}}
    with writing(database) as db:
        db.add(session("s"))
        db.flush()
        told_of_model = {"model_seq_id": 0, "base_model": "m", "rank": 1, "lora": {}}
        db.add(Model(model_id="m", session_id="s", restored_until=large, **told_of_model))
        db.add(Checkpoint(model_id="m", name="n", size_bytes=large, **fields))
        db.add(Request(request_id=large, kind=Kind.SAMPLE, payload=b"", payload_hash="", sample_seq_id=large))
    with reading(database) as db:
        assert db.exec(select(Checkpoint)).one().size_bytes == large
        assert db.exec(select(Request)).one().sample_seq_id == large
        assert db.exec(select(Model)).one().restored_until == large


def test_exceptions_roll_back(database: Engine) -> None:
    def fail() -> None:
        with writing(database) as db:
            db.add(ClientSession(session_id="a"))
            db.flush()
            raise RuntimeError("by test")

    with pytest.raises(RuntimeError, match="by test"):
        fail()
    with reading(database) as db:
        assert db.get(ClientSession, "a") is None


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_settings_of_sqlite(database: Engine) -> None:
    with database.connect() as connection:
        found = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")]
    assert found == ["wal", 1]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_some_commits_of_sqlite_are_durable(database: Engine) -> None:
    found = []
    for is_durable in (False, True, False):
        with writing(database, is_durable=is_durable) as db:
            found.append(db.connection().execute(text("PRAGMA synchronous")).scalar())
    assert found == [1, 2, 1]  # NORMAL, FULL


def test_readers_see_a_snapshot(database: Engine) -> None:
    with writing(database) as db:
        db.add(session("a"))
    with reading(database) as db:
        n_before = db.exec(select(func.count()).select_from(ClientSession)).one()
        with writing(database) as other:
            other.add(session("b"))
        assert db.exec(select(func.count()).select_from(ClientSession)).one() == n_before == 1
    with reading(database) as db:
        assert db.get(ClientSession, "b") is not None


def test_writers_wait_for_each_other(database: Engine, url: str) -> None:
    others = [open_database(url) for _ in range(3)]
    errors: list[Exception] = []

    def write(engine: Engine, name: str) -> None:
        try:
            for number in range(20):
                with writing(engine) as db:
                    n_before = db.exec(select(func.count()).select_from(ClientSession)).one()
                    db.add(ClientSession(session_id=f"{name}-{number}", display_name=str(n_before)))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=write, args=(one, f"w{i}")) for i, one in enumerate([database, *others])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with reading(database) as db:
        seen = sorted(int(one.display_name or -1) for one in db.exec(select(ClientSession)))
    assert seen == list(range(80))  # none has read what another was about to change
    for other in others:
        other.dispose()


def test_concurrent_processes_can_open_a_new_database(url: str) -> None:
    program = "import sys; from tx.tinker.store.database import open_database; open_database(sys.argv[1]).dispose()"
    command = [sys.executable, "-c", program, url]
    children = [subprocess.Popen(command, env=CHILD_ENVIRONMENT) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]


def test_commits_survive_a_kill(url: str) -> None:
    program = (
        "import os, sys\n"
        "from tx.tinker.store.database import open_database, writing\n"
        "from tx.tinker.db_models import Session\n"
        "database = open_database(sys.argv[1])\n"
        "for number in range(10):\n"
        "    with writing(database) as db: db.add(Session(session_id=str(number)))\n"
        "    print(number, flush=True)\n"
        "with writing(database) as db:\n"
        "    db.add(Session(session_id='never')); db.flush(); print('open', flush=True); input()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=CHILD_ENVIRONMENT,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        for line in child.stdout:
            if line.strip() == "open":
                os.kill(child.pid, signal.SIGKILL)
        child.wait()
    database = open_database(url)
    with reading(database) as db:
        assert sorted(one.session_id for one in db.exec(select(ClientSession))) == [str(n) for n in range(10)]
    database.dispose()
