"""Worker process that runs queries.

It reads ``[file, sql, seconds]`` and writes ``{"columns": …, "rows": …}`` or ``{"error": …, "is_timeout": …}``.
"""

import os
import resource
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

from skyrl_gym.isolation.kernel import set_limit
from skyrl_gym.queries.values import as_json
from skyrl_gym.worker_pool.serving import serve

MEMORY_BYTES = 1 << 30
RECYCLE_BYTES = 256 << 20
MAX_ROWS = 100_000
MAX_BYTES = 64 << 20  # of a whole result
MAX_VALUE_BYTES = 256 << 10  # bounds the time of a single function call
MAX_PATTERN_BYTES = 1000  # bounds the time of LIKE
STEPS_PER_TIME_CHECK = 1000  # instructions of SQLite's virtual machine

WAL_VERSION_OFFSET, WAL_VERSION = 18, 2  # in the header of a database
URI_OPTIONS = {"regular": "", "log": "&vfs=unix-none", "no log": "&immutable=1"}
"""URI options by log mode. WAL databases are read without locks, because only a writer can create the lock file."""

READ_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_TRANSACTION}
PRAGMAS = {
    "collation_list",
    "data_version",
    "database_list",
    "foreign_key_list",
    "function_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "page_count",
    "page_size",
    "table_info",
    "table_list",
    "table_xinfo",
}
"""Read-only pragmas."""
READ_PRAGMAS_WITHOUT_VALUE = {"data_version", "page_count", "page_size"}
PREPARED_ACTIONS = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
"""Actions of statements that a virtual table, e.g. of json_each or R*Tree, prepares when it is opened. Running them
fails, because the database is read-only."""
UNSAFE_FUNCTIONS = {"edit", "fts3_tokenizer", "icu_load_collation", "load_extension", "readfile", "writefile"}
"""Functions that run programs, open files or return addresses."""


def answer(question: list[Any]) -> dict[str, Any]:
    """Run a query and return its rows or its error."""
    file, sql, seconds = question
    deadline = time.monotonic() + seconds
    try:
        with _connection(file, deadline) as connection, closing(connection.execute(sql)) as cursor:
            columns = [name for name, *_ in cursor.description or ()]
            return {"columns": columns, "rows": list(_rows(cursor))}
    except MemoryError:
        return {"error": "it exceeded its memory limit", "is_timeout": False}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": str(error), "is_timeout": time.monotonic() >= deadline}


@contextmanager
def _connection(file: str, deadline: float) -> Iterator[sqlite3.Connection]:
    mode = _log_mode(file)
    uri = f"file:{quote(file)}?mode=ro{URI_OPTIONS[mode]}"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        connection.text_factory = lambda read: read.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.execute("PRAGMA temp_store = MEMORY")  # sorting counts towards the memory limit and fills no disk
        if mode == "log":
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # keeps the index of the log in memory
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_PER_TIME_CHECK)
        yield connection


def _log_mode(file: str) -> str:
    """Return how to open a database without changing any file: with its write-ahead `log`, without one, or as it is."""
    with open(file, "rb") as database:
        header = database.read(WAL_VERSION_OFFSET + 1)
    if header[WAL_VERSION_OFFSET:] != bytes([WAL_VERSION]):
        return "regular"
    log = f"{file}-wal"
    return "log" if os.path.exists(log) and os.path.getsize(log) > 0 else "no log"


def _authorize(action: int, first: str | None, second: str | None, database: str | None, _: str | None) -> int:
    """Allow a query to read data and the schema, nothing else."""
    if action == sqlite3.SQLITE_FUNCTION:
        is_allowed = str(second).lower() not in UNSAFE_FUNCTIONS
    elif action == sqlite3.SQLITE_PRAGMA:
        pragma = str(first).lower()
        is_allowed = pragma in PRAGMAS and (second is None or pragma not in READ_PRAGMAS_WITHOUT_VALUE)
    else:
        is_allowed = action in READ_ACTIONS or (action in PREPARED_ACTIONS and database == "main")
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _rows(cursor: sqlite3.Cursor) -> Iterator[list[Any]]:
    n_bytes = 0
    for n_rows, row in enumerate(cursor):
        n_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if n_rows >= MAX_ROWS or n_bytes > MAX_BYTES:
            raise sqlite3.DataError(f"the result has more than {MAX_ROWS} rows or {MAX_BYTES >> 20} MiB")
        yield [as_json(value) for value in row]


if __name__ == "__main__":
    set_limit(resource.RLIMIT_FSIZE, 0, is_final=True)
    # Any file is readable, because each question names its database.
    serve(int(sys.argv[1]), answer, memory_bytes=MEMORY_BYTES, recycle_bytes=RECYCLE_BYTES, readable=["/"])
