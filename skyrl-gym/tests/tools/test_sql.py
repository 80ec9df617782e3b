from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


@pytest.fixture
def group(database: Path) -> SQLCodeExecutorToolGroup:
    return SQLCodeExecutorToolGroup(str(database.parents[1]))


def test_an_answer(group: SQLCodeExecutorToolGroup) -> None:
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
def test_why_there_is_none(group: SQLCodeExecutorToolGroup, sql: str | None, told: str) -> None:
    assert told in group.sql("sho?p", sql, 2, timeout=0.1)


def test_a_long_answer_is_cut(group: SQLCodeExecutorToolGroup) -> None:
    many = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 5000) SELECT x FROM c"
    told = group.sql("sho?p", many, 1)
    assert "Truncated to 50 lines since returned response too long: " in told
    assert len(told) < 9300
    wide = group.sql("sho?p", f"SELECT hex(zeroblob(100000)) FROM ({many})", 1)
    assert len(wide) < 9300


def test_a_database_that_is_not_there_is_an_error(group: SQLCodeExecutorToolGroup) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.sqlite"):
        group.sql("nowhere", "SELECT 1", 1)


@pytest.mark.parametrize("name", ["../sho?p", "/tmp", "..", "", "sho?p/../sho?p"])
def test_a_database_outside_of_the_folder_is_none(group: SQLCodeExecutorToolGroup, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no database"):
        group.sql(name, "SELECT 1", 1)
