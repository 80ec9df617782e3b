"""A tool that asks a SQLite database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from skyrl_gym.queries import QueryError, QueryTimeout, Table, run_query
from skyrl_gym.tools.core import ToolGroup, tool

MAX_SECONDS = 60.0  # whoever calls the tool
SHOWN_CHARS, SHOWN_ROWS = 9000, 50


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
            return as_text(run_query(self._file(db_id), sql, min(timeout, MAX_SECONDS)))
        except QueryTimeout:
            return f"SQL Timeout:\n{sql}"
        except QueryError as error:
            return f"Error executing SQL: {error}, db file: {db_id}.sqlite"

    def _file(self, db_id: str) -> Path:
        """Where a database is; one outside of the folder is none of ours."""
        if Path(db_id).name != db_id:
            raise FileNotFoundError(
                f"there is no database {db_id!r}; it must be the name of a folder in {self._folder}"
            )
        return self._folder / db_id / f"{db_id}.sqlite"


def as_text(table: Table) -> str:
    """A result as a model reads it: a line for each row, and the first rows only where there are too many."""
    if len(table.rows) <= SHOWN_CHARS // 2 and len(shown := _lines(table, table.rows)) <= SHOWN_CHARS:
        return shown
    few = _lines(table, table.rows[:SHOWN_ROWS])[:SHOWN_CHARS]
    return f"Truncated to {SHOWN_ROWS} lines since returned response too long: {few}"


def _lines(table: Table, rows: Sequence[tuple[Any, ...]]) -> str:
    cells = [[str(value)[: SHOWN_CHARS + 1] for value in row] for row in rows]
    return tabulate(cells, table.columns, tablefmt="plain", disable_numparse=True, stralign="right")
