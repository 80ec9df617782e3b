from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_gym.envs.sql.grading import compute_score, has_order, verify_format_and_extract

EXPLORE = "<think>Let me see.</think><sql>SELECT count(*) AS n FROM goods</sql>"
THOUGHT = "<think>Now I know.</think>"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a limit 3", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'order by' FROM t", False),
        ('SELECT "order by" FROM t', False),
        ("SELECT a FROM t -- order by a", False),
        ("SELECT a /* order by */ FROM t", False),
        ("WITH c AS (SELECT 1) SELECT * FROM c ORDER BY 1", True),
        ("", False),
        ("(" * 100_000, False),
    ],
)
def test_has_order(query: str, expected: bool) -> None:
    assert has_order(query) is expected


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
