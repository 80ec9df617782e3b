"""Grading of SQL solutions: format and result.

Source: the format of SkyRL-SQL (Liu et al., 2025): think, query the database, think again, …, and answer.
"""

import math
import re
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from skyrl_gym.envs.sql.parts import N_PARTS, write_part
from skyrl_gym.envs.tags import all_between, first_between
from skyrl_gym.queries import QueryError, Table, run_query

QUERY_SECONDS = 30.0
FLOAT_TOLERANCE = 1e-9  # relative
Match = Literal["exact", "set"]
Row = tuple[Any, ...]

SOLUTION, END_OF_SOLUTION = "<solution>", "</solution>"
OTHER_TAGS = re.compile(r"</?(?:think|sql|observation)\b", re.IGNORECASE)
ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)


def verify_format_and_extract(output: str) -> tuple[bool, list[str] | None, str | None, None]:
    """Return (is_valid, thoughts, solution, None) for a conversation.

    A valid conversation has at least one thought, a thought directly after every observation, and exactly one
    `<solution>…</solution>`, outside thoughts and without other tags inside. The fourth value is for SkyRL code that
    unpacks four.

    >>> verify_format_and_extract("<think>All of them.</think><solution>SELECT 1</solution>")
    (True, ['All of them.'], 'SELECT 1', None)
    >>> verify_format_and_extract("<solution>SELECT 1</solution>")
    (False, None, None, None)
    """
    invalid = (False, None, None, None)
    before, _, rest = output.partition(SOLUTION)
    solution, _, after = rest.partition(END_OF_SOLUTION)
    is_single = output.count(SOLUTION) == 1 == rest.count(END_OF_SOLUTION)
    is_thought = "<think>" in before.rpartition("</think>")[2] or "</think>" in after.partition("<think>")[0]
    if not is_single or is_thought or OTHER_TAGS.search(solution):
        return invalid
    thoughts = [thought.strip() for thought in all_between(output, "<think>", "</think>")]
    after_observations = before.split("</observation>")[1:]
    if not thoughts or not all(text.lstrip().startswith("<think>") for text in after_observations):
        return invalid
    return True, thoughts, solution.strip(), None


def join_replies(replies: Sequence[str]) -> str:
    """Join the model's replies with empty observations, since the database's output is not graded."""
    return "<observation></observation>".join(replies)


def compute_score(output: str, ground_truth: str, db_file: Path, match: Match = "set") -> float:
    """Return -1 for a wrong format, 1 if the solution returns the result of `ground_truth`, else 0.

    A solution scores 0, whatever its result, if it reads none of the tables of `ground_truth` or its result does not
    depend on the data (`follows_data`).

    Raises:
        ValueError: the ground truth's query fails, so the solution cannot be graded.
    """
    is_valid, _, solution, _ = verify_format_and_extract(output)
    if not is_valid or solution is None:
        return -1.0
    try:
        expected = run_query(db_file, ground_truth, QUERY_SECONDS)
        expected_tables = find_tables(db_file, ground_truth)
    except QueryError as error:
        raise ValueError(f"the ground truth fails on {db_file}: {error}; {ground_truth}") from error
    try:
        actual = run_query(db_file, solution, QUERY_SECONDS)
        if expected_tables and expected_tables.isdisjoint(find_tables(db_file, solution)):
            return 0.0
    except QueryError:
        return 0.0
    if not is_same(actual, expected, match, is_ordered=has_order(ground_truth)):
        return 0.0
    return float(follows_data(db_file, (solution, actual), (ground_truth, expected)))


def follows_data(db_file: Path, solution: tuple[str, Table], ground_truth: tuple[str, Table]) -> bool:
    """Return False for a constant such as `SELECT 9 FROM goods LIMIT 1`.

    Both queries run on parts of the database. `solution` and `ground_truth` are pairs of a query and its result on the
    whole database. Return True if a part cannot be created or queried.

    Example: the prices are 2, 9, 4 and 7, the ground truth is `SELECT max(price) FROM goods`, and a model that guesses
    9 answers `SELECT 9 FROM goods LIMIT 1`. On the whole database, both return 9. On the part with the prices 2 and
    4, the ground truth returns 4, but the guess still returns 9. If the ground truth returns 9 on both parts, a
    guess cannot be detected, so the solution counts.
    """

    def changes(query: str, result: Table, part: Path) -> bool:
        return not is_same(run_query(part, query, QUERY_SECONDS), result, "set", is_ordered=False)

    has_changed = False
    with TemporaryDirectory() as folder:
        for number in range(N_PARTS):
            part = Path(folder) / f"part{number}.sqlite"
            try:
                write_part(db_file, number, part)
                if changes(*ground_truth, part):
                    has_changed = True
                    if changes(*solution, part):
                        return True
            except (sqlite3.Error, QueryError):
                return True
    return not has_changed


def find_tables(db_file: Path, query: str) -> set[str]:
    """Return the tables that SQLite opens for a query. Names are not enough: `WITH goods AS (SELECT 4)` reads none.

    Raises:
        QueryError: the query fails.
    """
    schema = run_query(db_file, "SELECT rootpage, tbl_name FROM sqlite_schema", QUERY_SECONDS).rows
    tables = {1: "sqlite_schema"} | {page: name for page, name in schema if page}
    program = run_query(db_file, f"EXPLAIN {query}", QUERY_SECONDS)
    opcode, page, database = (program.columns.index(name) for name in ("opcode", "p2", "p3"))
    return {tables[row[page]] for row in program.rows if row[opcode] == "OpenRead" and row[database] == 0}


def is_same(actual: Table, expected: Table, match: Match, *, is_ordered: bool) -> bool:
    """Return True if two results have the same rows with the same counts and, if `is_ordered`, in the same order.

    `set` ignores order and duplicates, as Spider and BIRD do. Floats are compared with `FLOAT_TOLERANCE`, because
    SQLite's summation order depends on the query.
    """
    rows, expected_rows = _with_equal_floats(actual.rows, expected.rows)
    if match == "set":
        return set(rows) == set(expected_rows)
    if is_ordered:
        return rows == expected_rows
    return Counter(rows) == Counter(expected_rows)


def _with_equal_floats(*tables: Sequence[Row]) -> list[list[Row]]:
    """Replace numbers that are equal within the tolerance with the first of them.

    Each number is compared with the first of its group, not with its neighbor, so a group cannot drift: 1 + 0.9e-9
    joins the group of 1, but 1 + 1.8e-9 starts a new one. Integers are compared exactly: 10,000,000,000 is not
    10,000,000,001.
    """
    first: dict[float, float] = {}
    numbers = {value for rows in tables for row in rows for value in row if isinstance(value, int | float)}
    previous: float = math.nan  # equal to no number
    for number in sorted(numbers):
        is_close = math.isclose(number, previous, rel_tol=FLOAT_TOLERANCE)
        previous = previous if is_close and (isinstance(number, float) or isinstance(previous, float)) else number
        first[number] = previous
    return [
        [tuple(first[value] if isinstance(value, int | float) else value for value in row) for row in rows]
        for rows in tables
    ]


def has_order(query: str) -> bool:
    """Return True if a query orders its result. An ORDER BY in parentheses, a string or a comment does not count.

    >>> has_order("SELECT a FROM t ORDER BY a")
    True
    >>> has_order("SELECT * FROM (SELECT a FROM t ORDER BY a)")
    False
    """
    kept: list[str] = []  # text outside parentheses, quotes and comments
    depth = 0
    position = 0
    while position < len(query):
        char = query[position]
        end = _CLOSING.get(query[position : position + 2]) or _CLOSING.get(char)
        if end is not None:
            found = query.find(end, position + 1)
            position = len(query) if found < 0 else found + len(end)
            kept.append(" ")
            continue
        depth += (char == "(") - (char == ")")
        if depth == 0:
            kept.append(char)
        position += 1
    return ORDER_BY.search("".join(kept)) is not None


_CLOSING = {"'": "'", '"': '"', "`": "`", "[": "]", "--": "\n", "/*": "*/"}


def extract_query(reply: str) -> str | None:
    """Return the first `<sql>…</sql>` of a reply, or None.

    >>> extract_query("<think>Count them.</think><sql>SELECT count(*) FROM t</sql>")
    'SELECT count(*) FROM t'
    """
    query = first_between(reply, "<sql>", "</sql>")
    return None if query is None else query.strip()
