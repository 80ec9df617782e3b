from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import psutil
import pytest

from skyrl_gym.tools.sql import QueryError, QueryTimeout, SQLCodeExecutorToolGroup, run_query

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    file = tmp_path / "sho?p" / "sho?p.sqlite"  # a name with a meaning in addresses
    file.parent.mkdir()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE goods (id INTEGER, name TEXT, price REAL)")
        connection.executemany(
            "INSERT INTO goods VALUES (?, ?, ?)", [(2, "pen", 1.5), (1, "ink", 4.0), (2, "pen", 1.5)]
        )
        connection.execute("INSERT INTO goods VALUES (3, CAST(x'ff' AS TEXT), NULL)")
    connection.close()
    return file


def test_rows_come_in_order_and_as_often_as_they_are(database: Path) -> None:
    table = run_query(database, "SELECT id, name FROM goods WHERE id < 3 ORDER BY id DESC", 5)
    assert (table.columns, table.rows) == (["id", "name"], [(2, "pen"), (2, "pen"), (1, "ink")])


def test_text_that_is_no_text_is_read(database: Path) -> None:
    assert run_query(database, "SELECT name, price FROM goods WHERE id = 3", 5).rows == [("�", None)]


def test_the_schema_can_be_asked_for(database: Path) -> None:
    assert [row[1] for row in run_query(database, "PRAGMA table_info(goods)", 5).rows] == ["id", "name", "price"]
    assert run_query(database, "SELECT name FROM sqlite_master", 5).rows == [("goods",)]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM goods",
        "DROP TABLE goods",
        "CREATE TABLE more (x)",
        "CREATE TEMP TABLE more (x)",
        "UPDATE goods SET price = 0",
        "INSERT INTO goods VALUES (9, 'x', 1)",
        "ATTACH DATABASE '/tmp/other.sqlite' AS other",
        "VACUUM INTO '/tmp/copy.sqlite'",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA writable_schema = 1",
        "PRAGMA temp_store_directory = '/tmp'",
        "SELECT load_extension('x')",
        "SELECT 1; DELETE FROM goods",
        "SELECT writefile('/tmp/x', 'y')",
        "SELECT nothing FROM goods",
        "SELEC 1",
        "SELECT hex(zeroblob(100000000))",
        "SELECT 'a' LIKE printf('%.*c', 5000, 'a')",
        "SELECT '\0'",
        "SELECT '\ud800'",
        "x" * 2_000_000,
        "(" * 100_000,
    ],
)
def test_what_it_does_not_do(database: Path, sql: str) -> None:
    before = database.read_bytes()
    with pytest.raises(QueryError):
        run_query(database, sql, 5)
    assert database.read_bytes() == before
    assert os.listdir(database.parent) == [database.name]


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS,
        f"SELECT count(*) FROM {', '.join(f'goods g{i}' for i in range(15))}",
    ],
)
def test_a_query_without_an_end_is_interrupted(database: Path, sql: str) -> None:
    started = time.monotonic()
    with pytest.raises(QueryTimeout, match=r"longer than 0\.2 seconds"):
        run_query(database, sql, 0.2)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("row", ["1", "hex(zeroblob(100000))"])
def test_a_result_without_an_end_is_refused(database: Path, row: str) -> None:
    endless = f"WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {row} FROM c"
    with pytest.raises(QueryError, match="the result has more than 100000 rows or 64 MiB"):
        run_query(database, endless, 60)


def test_many_at_once_leave_nothing(database: Path) -> None:
    before = psutil.Process().num_fds(), threading.active_count()
    results: list[int] = []

    def ask() -> None:
        results.extend(len(run_query(database, "SELECT * FROM goods", 5).rows) for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4] * 160
    assert (psutil.Process().num_fds(), threading.active_count()) == before


class TestTheTool:
    @pytest.fixture
    def group(self, database: Path) -> SQLCodeExecutorToolGroup:
        return SQLCodeExecutorToolGroup(str(database.parents[1]))

    def test_an_answer(self, group: SQLCodeExecutorToolGroup) -> None:
        assert group.sql("sho?p", "SELECT id, name FROM goods WHERE id = 1", 2) == (
            "\n\n<observation>  id    name\n   1     ink\n"
            "<reminder>You have 2 turns left to complete the task.</reminder></observation>\n\n"
        )

    @pytest.mark.parametrize(
        ("sql", "told"),
        [
            (None, "Your previous action is invalid"),
            ("SELECT nobody", "Error executing SQL: no such column: nobody, db file: sho?p.sqlite"),
            (ENDLESS, f"SQL Timeout:\n{ENDLESS}"),
        ],
    )
    def test_why_there_is_none(self, group: SQLCodeExecutorToolGroup, sql: str | None, told: str) -> None:
        assert told in group.sql("sho?p", sql, 2, timeout=0.1)

    def test_a_long_answer_is_cut(self, group: SQLCodeExecutorToolGroup) -> None:
        many = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 5000) SELECT x FROM c"
        told = group.sql("sho?p", many, 1)
        assert "Truncated to 50 lines since returned response too long: " in told
        assert len(told) < 9300
        wide = group.sql("sho?p", f"SELECT hex(zeroblob(100000)) FROM ({many})", 1)
        assert len(wide) < 9300

    def test_a_database_that_is_not_there_is_an_error(self, group: SQLCodeExecutorToolGroup) -> None:
        with pytest.raises(FileNotFoundError, match=r"nowhere\.sqlite"):
            group.sql("nowhere", "SELECT 1", 1)
