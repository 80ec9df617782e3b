from pathlib import Path

import pytest

from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


@pytest.fixture
def group(database: Path) -> SQLCodeExecutorToolGroup:
    return SQLCodeExecutorToolGroup(str(database.parents[1]))


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (None, "Your previous action is invalid"),
        ("SELECT nobody", "Error executing SQL: no such column: nobody, db file: sho?p.sqlite"),
        (ENDLESS, f"SQL Timeout:\n{ENDLESS}"),
    ],
)
def test_failures_are_explained(group: SQLCodeExecutorToolGroup, sql: str | None, message: str) -> None:
    assert message in group.sql("sho?p", sql, 2, timeout=0.1)


def test_long_result_is_truncated(group: SQLCodeExecutorToolGroup) -> None:
    many = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 5000) SELECT x FROM c"
    message = group.sql("sho?p", many, 1)
    assert "Truncated to 50 lines since returned response too long: " in message
    assert len(message) < 9300
    wide = group.sql("sho?p", f"SELECT hex(zeroblob(100000)) FROM ({many})", 1)
    assert len(wide) < 9300


@pytest.mark.parametrize("name", ["nowhere", "../sho?p", "/tmp", "..", "", "sho?p/../sho?p"])
def test_missing_database_and_one_outside_of_the_folder_are_refused(group: SQLCodeExecutorToolGroup, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"the database .* does not exist"):
        group.sql(name, "SELECT 1", 1)
