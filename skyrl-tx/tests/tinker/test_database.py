from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import BigInteger, Engine, Integer, text
from sqlmodel import SQLModel, func, select
from tx_server import CHILD_ENVIRONMENT

from tx.tinker.database import open_database, reading, writing
from tx.tinker.db_models import Session as ClientSession


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/new/folder/tinker.db"


@pytest.fixture
def database(url: str) -> Iterator[Engine]:
    opened = open_database(url)
    yield opened
    opened.dispose()


def _differ(_: object, __: object, ___: object, inspected: object, told: object) -> bool:
    """The database may have room for larger numbers."""
    return not isinstance(inspected, BigInteger | Integer) and None  # type: ignore[return-value]


def test_migrations_make_what_the_models_say(database: Engine) -> None:
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


def test_what_raises_is_undone(database: Engine) -> None:
    def fail() -> None:
        with writing(database) as db:
            db.add(ClientSession(session_id="a"))
            db.flush()
            raise RuntimeError("by test")

    with pytest.raises(RuntimeError, match="by test"):
        fail()
    with reading(database) as db:
        assert db.get(ClientSession, "a") is None


def test_settings_of_sqlite(database: Engine) -> None:
    with database.connect() as connection:
        found = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")]
    assert found == ["wal", 1]


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


def test_processes_open_a_new_database_at_once(url: str) -> None:
    program = "import sys; from tx.tinker.database import open_database; open_database(sys.argv[1]).dispose()"
    command = [sys.executable, "-c", program, url]
    children = [subprocess.Popen(command, env=CHILD_ENVIRONMENT) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]


def test_what_is_committed_outlasts_a_kill(url: str) -> None:
    program = (
        "import os, sys\n"
        "from tx.tinker.database import open_database, writing\n"
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
