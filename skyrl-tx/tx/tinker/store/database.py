"""The database: SQLite in a file, or PostgreSQL. Opening it applies pending migrations.

SQLite uses a write-ahead log: readers and the writer do not block each other, and commits survive a process crash.
Writers take the lock at BEGIN and wait for each other. If two transactions read first and then both tried to write, one
of them would fail. On PostgreSQL, an advisory lock serializes writers in the same way. Writers therefore never act on
rows that a concurrent writer is changing, and request numbers become visible in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config as AlembicConfig
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import make_url
from sqlmodel import Session, create_engine

BUSY_MS = 30_000
POOL_SIZE, MAX_OVERFLOW = 16, 32
MIGRATIONS = Path(__file__).parent / "migrations"
WRITES, DURABLE = "tx_writes", "tx_durable"
LOCK = 7_246_331_001
"""Key of the PostgreSQL advisory lock for writers."""


def open_database(url: str) -> Engine:
    """Open the database at a URL, creating its file, folder and tables if missing. Close it with `dispose()`."""
    parsed = make_url(url)
    pool = {"pool_size": POOL_SIZE, "max_overflow": MAX_OVERFLOW}
    if parsed.get_backend_name() == "sqlite":
        if parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        connect_args = {"check_same_thread": False, "timeout": BUSY_MS / 1000}
        database = create_engine(parsed, connect_args=connect_args, **pool)
        event.listen(database, "connect", _set_up_sqlite)
        event.listen(database, "begin", _begin_sqlite)
    else:
        database = create_engine(parsed, isolation_level="REPEATABLE READ", pool_pre_ping=True, **pool)
        event.listen(database, "begin", _begin_postgresql)
    config = AlembicConfig()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with _for_writing(database).begin() as connection:  # other processes wait for the migration
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return database


@contextmanager
def reading(database: Engine) -> Iterator[Session]:
    """Open a read-only session on a consistent snapshot. Loaded objects stay readable afterwards."""
    with Session(database, expire_on_commit=False) as session:
        yield session


@contextmanager
def writing(database: Engine, *, is_durable: bool = False) -> Iterator[Session]:
    """Open a session that commits at the end of the block and rolls back on an exception.

    On SQLite, a power loss may undo a commit, unless that commit or a later one was durable.
    """
    with Session(_for_writing(database, is_durable), expire_on_commit=False) as session, session.begin():
        yield session


def _for_writing(database: Engine, is_durable: bool = False) -> Engine:
    if database.dialect.name == "sqlite":
        return database.execution_options(**{WRITES: True, DURABLE: is_durable})
    # the transaction must see rows that were committed while it waited for the lock
    return database.execution_options(**{WRITES: True}, isolation_level="READ COMMITTED")


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions instead of the driver
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
