import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from gym_kit.databases import write_database
from gym_kit.processes import SECONDS, kill, no_leaks, workers

from skyrl_gym import queries
from skyrl_gym.queries import QueryError, QueryTimeout, Table, run_query

MODULE = "skyrl_gym.queries"
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
VIRTUAL_TABLES = """
    CREATE VIRTUAL TABLE texts3 USING fts3(x); INSERT INTO texts3 VALUES ('hello world');
    CREATE VIRTUAL TABLE texts4 USING fts4(x); INSERT INTO texts4 VALUES ('hello world');
    CREATE VIRTUAL TABLE texts5 USING fts5(x); INSERT INTO texts5 VALUES ('hello world');
    CREATE VIRTUAL TABLE areas USING rtree(id, low, high); INSERT INTO areas VALUES (1, 2, 3);
"""


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_this_module() -> Iterator[None]:
    with no_leaks():
        yield
        queries.close()


@pytest.mark.parametrize(
    ("sql", "columns", "rows"),
    [
        ("SELECT id, name FROM goods WHERE id < 3 ORDER BY id DESC", "id name", [(2, "pen"), (2, "pen"), (1, "ink")]),
        ("SELECT name, price FROM goods WHERE id = 3", "name price", [("�", None)]),  # invalid UTF-8
        ("SELECT name FROM sqlite_master", "name", [("goods",)]),
        (
            "SELECT NULL a, 9223372036854775807 b, -0.5 c, 9e999 d, char(10) || char(128512) e, x'00ff' f, '' g",
            "a b c d e f g",
            [(None, (1 << 63) - 1, -0.5, float("inf"), "\n\U0001f600", b"\x00\xff", "")],
        ),
    ],
)
def test_rows_and_columns(database: Path, sql: str, columns: str, rows: list[tuple[Any, ...]]) -> None:
    assert run_query(database, sql, 5) == Table(columns.split(), rows)


@pytest.mark.parametrize(
    "sql",
    [
        *("DELETE FROM goods", "DROP TABLE goods", "CREATE TABLE more (x)", "CREATE TEMP TABLE more (x)"),
        *("UPDATE goods SET price = 0", "INSERT INTO goods VALUES (9, 'x', 1)", "UPDATE sqlite_master SET sql = ''"),
        *("ATTACH DATABASE '/tmp/other.sqlite' AS other", "VACUUM INTO '/tmp/copy.sqlite'"),
        *("PRAGMA journal_mode = DELETE", "PRAGMA writable_schema = 1", "PRAGMA temp_store_directory = '/tmp'"),
        *("PRAGMA page_size = 512", "SELECT * FROM pragma_journal_mode('delete')", "PRAGMA locking_mode = NORMAL"),
        *("SELECT load_extension('x')", "SELECT fts3_tokenizer('simple')", "SELECT FTS3_Tokenizer('simple')"),
        *("SELECT 1; DELETE FROM goods", "SELECT writefile('/tmp/x', 'y')", "SELECT nothing FROM goods", "SELEC 1"),
        *("SELECT hex(zeroblob(100000000))", "SELECT 'a' LIKE printf('%.*c', 5000, 'a')"),
        *("SELECT '\0'", "SELECT '\ud800'", "x" * 2_000_000, "(" * 100_000),
    ],
    ids=lambda sql: ascii(sql[:60]),
)
def test_unsafe_or_invalid_queries_are_refused(database: Path, sql: str) -> None:
    before = database.read_bytes()
    with pytest.raises(QueryError):
        run_query(database, sql, 5)
    assert database.read_bytes() == before
    assert os.listdir(database.parent) == [database.name]


@pytest.mark.parametrize("sql", [ENDLESS, f"SELECT count(*) FROM {', '.join(f'goods g{i}' for i in range(15))}"])
def test_endless_query_is_interrupted(database: Path, sql: str) -> None:
    with pytest.raises(QueryTimeout, match=r"longer than 0\.2 seconds"):
        run_query(database, sql, 0.2)


@pytest.mark.parametrize("row", ["1", "hex(zeroblob(100000))"])
def test_endless_result_is_refused(database: Path, row: str) -> None:
    endless = f"WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {row} FROM c"
    with pytest.raises(QueryError, match="the result has more than 100000 rows or 64 MiB"):
        run_query(database, endless, 60)


@pytest.mark.parametrize("state", ["closed", "open", "copied while open", "copied without its index"])
def test_database_in_wal_mode_is_read(database: Path, tmp_path: Path, state: str) -> None:
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("INSERT INTO goods VALUES (4, 'nib', 0.5)")
        writer.commit()
        if state == "closed":
            writer.close()
        elif state != "open":
            database = Path(shutil.copytree(database.parent, tmp_path / "copy")) / database.name
            if state == "copied without its index":
                database.with_name(database.name + "-shm").unlink()
        files = {path.name: path.read_bytes() for path in database.parent.iterdir()}
        for _ in range(2):
            assert run_query(database, "SELECT name FROM goods WHERE id = 4", 5).rows == [("nib",)]
        assert {path.name: path.read_bytes() for path in database.parent.iterdir()} == files


def test_wide_table_is_read(database: Path) -> None:
    columns, values = ", ".join(f"c{i}" for i in range(250)), ", ".join(map(str, range(250)))
    write_database(database, f"CREATE TABLE wide ({columns}); INSERT INTO wide VALUES ({values})")
    assert run_query(database, "SELECT * FROM wide", 5).rows == [tuple(range(250))]
    assert len(run_query(database, "SELECT * FROM goods", 5).rows) == 4


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT value FROM json_each('[1, 2]')", [(1,), (2,)]),
        ("SELECT goods.id, j.value FROM goods, json_each('[7]') AS j WHERE goods.id = 1", [(1, 7)]),
        ("SELECT atom FROM json_tree('[3]') WHERE atom", [(3,)]),
        ("SELECT name FROM pragma_table_info('goods')", [("id",), ("name",), ("price",)]),
        ("SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c WHERE c.cid = 0", None),
        ("SELECT x FROM texts3 WHERE x MATCH 'hello'", [("hello world",)]),
        ("SELECT snippet(texts4) FROM texts4 WHERE texts4 MATCH 'hello'", [("<b>hello</b> world",)]),
        ("SELECT highlight(texts5, 0, '<', '>') FROM texts5('hello') ORDER BY rank", [("<hello> world",)]),
        ("SELECT id FROM areas WHERE low < 3 AND high > 2", [(1,)]),
    ],
)
def test_virtual_tables_are_read(database: Path, sql: str, rows: list[tuple[Any, ...]] | None) -> None:
    write_database(database, VIRTUAL_TABLES)
    found = run_query(database, sql, 5).rows
    assert found == rows if rows is not None else len(found) > 5
    for write in (
        "INSERT INTO texts5(texts5) VALUES ('rebuild')",
        "DELETE FROM areas",
        "SELECT optimize(texts4) FROM texts4",
    ):
        before = database.read_bytes()
        with suppress(QueryError):
            run_query(database, write, 5)
        assert database.read_bytes() == before


def test_heavy_queries_fail_alone(database: Path) -> None:
    values = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    with pytest.raises(QueryError, match="memory"):
        run_query(database, f"{values} SELECT x || hex(zeroblob(120000)) AS y FROM c ORDER BY y", 60)
    assert run_query(database, "SELECT 1", 5).rows == [(1,)]
    # SQLite does not check the time inside a function
    sought, text = "hex(zeroblob(60000)) || '1'", "hex(zeroblob(120000))"
    slow = " + ".join([f"instr({text}, {sought})"] * 20)
    with pytest.raises(QueryTimeout):
        run_query(database, f"SELECT {slow}", 0.3)
    assert run_query(database, "SELECT 1", 5).rows == [(1,)]


def test_query_fails_after_two_dead_workers(database: Path, question_semaphore: threading.Semaphore) -> None:
    queries.close()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(run_query, database, ENDLESS, 60.0)
        for _ in range(2):
            assert question_semaphore.acquire(timeout=SECONDS)
            kill(workers(MODULE))
        with pytest.raises(QueryError, match="exceeded its time or memory limit"):
            asked.result(timeout=SECONDS)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_timeout_must_be_positive(database: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* must be a positive number"):
        run_query(database, "SELECT 1", seconds)
