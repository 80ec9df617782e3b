"""The database: SQLite in a file, or PostgreSQL by its URL. Tables are brought up to date when it is opened.

SQLite writes ahead (WAL), so that readers and a writer do not wait for each other, and what is committed outlasts the
death of a process. Whoever is going to write says so at the beginning: two that read and then both wanted to write
would fail, and two that say so wait for each other. PostgreSQL lets writers wait for each other in the same way, with a
lock of its own, so that nobody decides by what another is changing, and numbers are seen in the order they are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config as AlembicConfig
from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.engine import make_url
from sqlmodel import Session, create_engine

BUSY_MS = 30_000
POOL_SIZE, MOST_OVERFLOW = 16, 32
MIGRATIONS = Path(__file__).parent / "migrations"
WRITES, DURABLE = "tx_writes", "tx_durable"
LOCK = 7_246_331_001
"""Of PostgreSQL, which a writer has."""


def open_database(url: str) -> Engine:
    """The database at a URL, with all tables; its file and folder are made. End it with `dispose()`."""
    parsed = make_url(url)
    database = _open_sqlite(parsed) if parsed.get_backend_name() == "sqlite" else _open_postgresql(parsed)
    _migrate(database)
    return database


def _open_sqlite(url: URL) -> Engine:
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    connect_args = {"check_same_thread": False, "timeout": BUSY_MS / 1000}
    database = create_engine(url, connect_args=connect_args, pool_size=POOL_SIZE, max_overflow=MOST_OVERFLOW)
    event.listen(database, "connect", _set_up_sqlite)
    event.listen(database, "begin", _begin_sqlite)
    return database


def _open_postgresql(url: URL) -> Engine:
    database = create_engine(
        url,
        isolation_level="REPEATABLE READ",
        pool_size=POOL_SIZE,
        max_overflow=MOST_OVERFLOW,
        pool_pre_ping=True,
    )
    event.listen(database, "begin", _begin_postgresql)
    return database


@contextmanager
def reading(database: Engine) -> Iterator[Session]:
    """A session that sees one state of the database, and writes nothing. What it loads stays readable after it."""
    with Session(database, expire_on_commit=False) as session:
        yield session


@contextmanager
def writing(database: Engine, *, is_durable: bool = False) -> Iterator[Session]:
    """A session that is committed at the end of the block, or undone if that raises.

    What is committed to SQLite may be undone by a loss of power; not so what is durable, and what was before it.
    """
    with Session(_for_writing(database, is_durable), expire_on_commit=False) as session, session.begin():
        yield session


def _for_writing(database: Engine, is_durable: bool = False) -> Engine:
    if database.dialect.name == "sqlite":
        return database.execution_options(**{WRITES: True, DURABLE: is_durable})
    # what is there when the lock is got is seen, and not what was there before the wait for it
    return database.execution_options(**{WRITES: True}, isolation_level="READ COMMITTED")


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # so that `_begin_sqlite` says how transactions begin, and not the driver
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={BUSY_MS}", "journal_mode=WAL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get(WRITES, False):
        connection.exec_driver_sql("BEGIN")
        return
    connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options[DURABLE] else 'NORMAL'}")
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_postgresql(connection: Connection) -> None:
    if connection.get_execution_options().get(WRITES, False):
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {BUSY_MS}; SELECT pg_advisory_xact_lock({LOCK})")


def _migrate(database: Engine) -> None:
    """Apply what is missing; of several processes that try, one does it, and the others wait."""
    config = AlembicConfig()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with _for_writing(database).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
