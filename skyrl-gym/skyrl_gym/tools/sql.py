"""A tool that queries a SQLite database."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from skyrl_gym.queries import QueryError, QueryTimeout, Table, run_query
from skyrl_gym.tools.core import ToolGroup, tool

MAX_SECONDS = 60.0  # upper bound of `timeout`, since a model may choose it
MAX_CHARS, MAX_ROWS = 9000, 50


class SQLCodeExecutorToolGroup(ToolGroup):
    """The tool `sql`, over the databases `<db_file_path>/<db_id>/<db_id>.sqlite`."""

    def __init__(self, db_file_path: str) -> None:
        super().__init__(name="SQLCodeExecutorToolGroup")
        self._folder = Path(db_file_path)

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5.0) -> str:
        """Run a query on a database.

        Args:
            db_id: name of the database
            sql: one SELECT statement; None if the reply had none
            turns_left: number of turns left, for the reminder in the answer
            timeout: time limit in seconds
        """
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{self._answer(db_id, sql, timeout)}\n{reminder}</observation>\n\n"

    def _answer(self, db_id: str, sql: str | None, timeout: float) -> str:
        if sql is None:
            return "Your previous action is invalid: write one query between <sql> and </sql>, and try again."
        try:
            if Path(db_id).name != db_id:
                raise FileNotFoundError(
                    f"the database {db_id!r} does not exist; it must be the name of a folder in {self._folder}"
                )
            file = self._folder / db_id / f"{db_id}.sqlite"
            table = run_query(file, sql, min(timeout, MAX_SECONDS))
            if len(table.rows) <= MAX_CHARS // 2 and len(text := _lines(table, table.rows)) <= MAX_CHARS:
                return text
            first_rows = _lines(table, table.rows[:MAX_ROWS])[:MAX_CHARS]
            return f"Truncated to {MAX_ROWS} lines since returned response too long: {first_rows}"
        except QueryTimeout:
            return f"SQL Timeout:\n{sql}"
        except QueryError as error:
            return f"Error executing SQL: {error}, db file: {db_id}.sqlite"


def _lines(table: Table, rows: Sequence[tuple[Any, ...]]) -> str:
    cells = [[str(value)[: MAX_CHARS + 1] for value in row] for row in rows]
    return tabulate(cells, table.columns, tablefmt="plain", disable_numparse=True, stralign="right")
