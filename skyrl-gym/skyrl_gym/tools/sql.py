"""A tool that asks a SQLite database, which it can neither change nor leave."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tabulate import tabulate

from skyrl_gym.tools.core import ToolGroup, tool

MOST_ROWS = 100_000
MOST_BYTES = 64 << 20  # of a whole result
VALUE_BYTES = 256 << 10  # the time that one call of a function takes grows with it, and nothing can interrupt it
MOST_COLUMNS = 200
PATTERN_BYTES = 1000  # of LIKE, whose time grows with it
STEPS_BETWEEN_LOOKS = 1000  # of SQLite's machine, between two looks at the clock
SHOWN_CHARS, SHOWN_ROWS = 9000, 50

READING = {
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
"""Those that only tell of the schema."""


class QueryError(Exception):
    """A query that SQLite refuses, or that takes more than it may."""


class QueryTimeout(QueryError):
    """A query that takes too long."""


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a query, in its order."""

    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]

    def text(self) -> str:
        """As a model reads it: a line for each row, and the first rows only where there are too many."""
        if len(self.rows) <= SHOWN_CHARS // 2 and len(shown := self._text(self.rows)) <= SHOWN_CHARS:
            return shown
        few = self._text(self.rows[:SHOWN_ROWS])[:SHOWN_CHARS]
        return f"Truncated to {SHOWN_ROWS} lines since returned response too long: {few}"

    def _text(self, rows: Sequence[tuple[Any, ...]]) -> str:
        cells = [[_cell(value) for value in row] for row in rows]
        return tabulate(cells, self.columns, tablefmt="plain", disable_numparse=True, stralign="right")


def run_query(file: Path, sql: str, timeout: float) -> Table:
    """The answer of the database in `file`, which is opened for reading only; `timeout` in seconds.

    Raises:
        FileNotFoundError: there is no such file.
        QueryTimeout: it takes longer.
        QueryError: anything else that is wrong with the query.
    """
    if not file.is_file():
        raise FileNotFoundError(f"there is no database {file}")
    deadline = time.monotonic() + timeout
    with _connection(file, deadline) as connection:
        try:
            with closing(connection.execute(sql)) as cursor:
                columns = [name for name, *_ in cursor.description or ()]
                return Table(columns, list(_rows(cursor)))
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            if time.monotonic() >= deadline:
                raise QueryTimeout(f"it took longer than {timeout:g} seconds") from error
            raise QueryError(str(error)) from error


@contextmanager
def _connection(file: Path, deadline: float) -> Iterator[sqlite3.Connection]:
    uri = f"file:{quote(str(file.resolve()))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)) as connection:
        connection.text_factory = lambda read: read.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, PATTERN_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_may)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_BETWEEN_LOOKS)
        yield connection


def _may(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Whether a query may do this: read, and be told of the schema."""
    is_extension = action == sqlite3.SQLITE_FUNCTION and second == "load_extension"
    is_allowed = action in READING and not is_extension
    if action == sqlite3.SQLITE_PRAGMA:
        is_allowed = str(first).lower() in PRAGMAS
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _rows(cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
    n_bytes = 0
    for n_rows, row in enumerate(cursor):
        n_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if n_rows >= MOST_ROWS or n_bytes > MOST_BYTES:
            raise sqlite3.DataError(f"the result has more than {MOST_ROWS} rows or {MOST_BYTES >> 20} MiB")
        yield row


def _cell(value: Any) -> str:
    return str(value)[: SHOWN_CHARS + 1]


class SQLCodeExecutorToolGroup(ToolGroup):
    """The tool `sql`, over the databases `<db_file_path>/<db_id>/<db_id>.sqlite`."""

    def __init__(self, db_file_path: str) -> None:
        super().__init__(name="SQLCodeExecutorToolGroup")
        self._folder = Path(db_file_path)

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5.0) -> str:
        """Ask a database.

        Args:
            db_id: which one
            sql: one SELECT statement; None if the reply had none
            turns_left: what the answer reminds of
            timeout: seconds
        """
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{self._answer(db_id, sql, timeout)}\n{reminder}</observation>\n\n"

    def _answer(self, db_id: str, sql: str | None, timeout: float) -> str:
        if sql is None:
            return "Your previous action is invalid: write one query between <sql> and </sql>, and try again."
        try:
            return run_query(self._folder / db_id / f"{db_id}.sqlite", sql, timeout).text()
        except QueryTimeout:
            return f"SQL Timeout:\n{sql}"
        except QueryError as error:
            return f"Error executing SQL: {error}, db file: {db_id}.sqlite"
