"""A worker that runs queries: it receives ``[file, sql, seconds]``, and answers ``{"columns": …, "rows": …}`` or
``{"error": …, "is_timeout": …}``.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

from skyrl_gym.queries.values import as_json
from skyrl_gym.worker_pool.serving import serve, set_limit

MEMORY_BYTES = 1 << 30
RECYCLE_BYTES = 256 << 20
MAX_ROWS = 100_000
MAX_BYTES = 64 << 20  # of a whole result
MAX_VALUE_BYTES = 256 << 10  # bounds the time of a single function call
MAX_COLUMNS = 200
MAX_PATTERN_BYTES = 1000  # bounds the time of LIKE
STEPS_PER_TIME_CHECK = 1000  # instructions of SQLite's virtual machine

READ_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_TRANSACTION,
}
PRAGMAS = {
    "collation_list",
    "database_list",
    "foreign_key_list",
    "function_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "table_info",
    "table_list",
    "table_xinfo",
}
"""Pragmas that only read the schema."""


def answer(question: list[Any]) -> dict[str, Any]:
    """Run a query; return its rows or its error."""
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
    with closing(sqlite3.connect(f"file:{quote(file)}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.text_factory = lambda read: read.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MAX_COLUMNS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.execute("PRAGMA temp_store = MEMORY")  # sorting counts towards the memory limit and fills no disk
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_PER_TIME_CHECK)
        yield connection


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow a query to read data and the schema, and nothing else."""
    is_extension = action == sqlite3.SQLITE_FUNCTION and second == "load_extension"
    is_allowed = action in READ_ACTIONS and not is_extension
    if action == sqlite3.SQLITE_PRAGMA:
        is_allowed = str(first).lower() in PRAGMAS
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _rows(cursor: sqlite3.Cursor) -> Iterator[list[Any]]:
    n_bytes = 0
    for n_rows, row in enumerate(cursor):
        n_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if n_rows >= MAX_ROWS or n_bytes > MAX_BYTES:
            raise sqlite3.DataError(f"the result has more than {MAX_ROWS} rows or {MAX_BYTES >> 20} MiB")
        yield [as_json(value) for value in row]


if __name__ == "__main__":
    set_limit("RLIMIT_FSIZE", 0)
    serve(int(sys.argv[1]), answer, memory_bytes=MEMORY_BYTES, recycle_bytes=RECYCLE_BYTES)
