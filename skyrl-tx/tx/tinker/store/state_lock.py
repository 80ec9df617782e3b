"""Locks on the state: at any time, one server starts engines, one engine runs, and one server dispatches samples.

Two engines would take the same requests, and an old engine could finish a step after a new one has restored its model.
The locks are kernel locks on files in the folder and next to the database, or PostgreSQL locks. They vanish with the
process that holds them, however it ends.
"""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Self

from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from tx.tinker.config import TxConfig
from tx.tinker.db_models import now

logger = logging.getLogger(__name__)

Role = Literal["server", "engine", "dispatcher"]
NUMBERS: dict[Role, int] = {"server": 7_246_331_002, "engine": 7_246_331_003, "dispatcher": 7_246_331_004}
"""Numbers of PostgreSQL's advisory locks."""
CHECK_INTERVAL_SEC = 1.0
HOLDER = text(
    "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted "
    "AND (classid::bigint << 32) + objid::bigint = :number AND objsubid = 1 "
    "AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class StateTakenError(Exception):
    """A different process holds the lock. The message describes it."""


class StateLock:
    """The lock of one role. It is released at the end of the block, or with the process."""

    def __init__(self, config: TxConfig, role: Role) -> None:
        self._config = config
        self._role = role
        self._held = ExitStack()
        self._connection: Connection | None = None
        self._checked_at = 0.0

    def take(self) -> None:
        """Take the lock.

        Raises:
            StateTakenError: a different process holds it.
        """
        url = make_url(self._config.database_url)
        with ExitStack() as taken:
            self._lock(self._config.checkpoints_base / f"{self._role}.lock", taken)
            if url.get_backend_name() == "sqlite" and url.database:
                self._lock(Path(f"{url.database}.{self._role}.lock"), taken)
            if url.get_backend_name() == "postgresql":
                self._lock_postgresql(taken)
            self._held = taken.pop_all()

    def wait(self, seconds: float, should_end: Callable[[], bool]) -> None:
        """Take the lock. Wait up to `seconds` for its holder to exit, calling `should_end`, which may block."""
        deadline = time.monotonic() + seconds
        has_logged = False
        while True:
            try:
                return self.take()
            except StateTakenError as error:
                if should_end() or time.monotonic() > deadline:
                    raise
                if not has_logged:
                    logger.warning("%s. Waiting up to %g s for it to exit", error, seconds)
                    has_logged = True

    def is_held(self) -> bool:
        """Return True if the lock is still held. PostgreSQL's ends with the connection."""
        if self._connection is None or time.monotonic() - self._checked_at < CHECK_INTERVAL_SEC:
            return True
        self._checked_at = time.monotonic()
        try:
            self._connection.execute(text("SELECT 1"))
        except SQLAlchemyError:
            logger.exception("the database lock is lost")
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection = None
        self._held.close()

    def _lock(self, file: Path, taken: ExitStack) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        taken.callback(os.close, opened)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken_error(file, os.pread(opened, 500, 0).decode("utf-8", "replace")) from None
        except OSError as error:  # e.g. on some network file systems
            logger.warning("cannot lock %s (%s): make sure that no other %s uses it", file, error, self._role)
        os.ftruncate(opened, 0)
        os.pwrite(opened, _name().encode(), 0)

    def _lock_postgresql(self, taken: ExitStack) -> None:
        url, number = make_url(self._config.database_url), {"number": NUMBERS[self._role]}
        settings = {"application_name": _name()[:63], "keepalives_idle": 30}
        database = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool, connect_args=settings)
        taken.callback(database.dispose)
        connection = taken.enter_context(database.connect())
        if not connection.execute(text("SELECT pg_try_advisory_lock(:number)"), number).scalar_one():
            raise self._taken_error(url, connection.execute(HOLDER, number).scalar() or "")
        self._connection = connection

    def _taken_error(self, resource: object, holder: str) -> StateTakenError:
        fix = "stop it, or use another --checkpoints-base and --database-url"
        who = holder or "another process"
        return StateTakenError(f"{resource} is in use by another {self._role}, {who}; {fix}")


def _name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {now():%Y-%m-%d %H:%M} UTC"
