from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_gym.envs.sql.grading import compute_score, has_order, verify_format_and_extract

EXPLORE = "<think>Let me see.</think><sql>SELECT count(*) AS n FROM goods</sql>"
THOUGHT = "<think>Now I know.</think>"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT a FROM t ORDER BY a",
        "select a from t order\n by a limit 3",
        "WITH c AS (SELECT 1) SELECT * FROM c ORDER BY 1",
    ],
)
def test_outermost_order_counts(query: str) -> None:
    assert has_order(query)


@pytest.mark.parametrize(
    "query",
    [
        *("SELECT a FROM (SELECT a FROM t ORDER BY a)", "SELECT rank() OVER (ORDER BY a) FROM t", "", "(" * 100_000),
        *("SELECT 'order by' FROM t", 'SELECT "order by" FROM t'),
        *("SELECT a FROM t -- order by a", "SELECT a /* order by */ FROM t"),
    ],
)
def test_other_orders_do_not_count(query: str) -> None:
    assert not has_order(query)


def test_conversation_with_one_solution_is_valid() -> None:
    solution = f"{THOUGHT}\n<solution> SELECT 1 </solution>"
    text = f"{EXPLORE}<observation>4</observation>\n{solution}"
    assert verify_format_and_extract(text) == (True, ["Let me see.", "Now I know."], "SELECT 1", None)
    assert verify_format_and_extract(solution) == (True, ["Now I know."], "SELECT 1", None)
    assert verify_format_and_extract("") == (False, None, None, None)
    for second in ("SELECT 1<solution>SELECT 2</solution>", "SELECT 1</solution><solution>"):
        assert not verify_format_and_extract(f"{THOUGHT}<solution>{second}")[0]


def test_compute_score(database: Path) -> None:
    gold = "SELECT name FROM goods WHERE id < 3"
    assert compute_score(f"{THOUGHT}<solution>{gold}</solution>", gold, database) == 1.0
    assert compute_score(gold, gold, database) == -1.0
