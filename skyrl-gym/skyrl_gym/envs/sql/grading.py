"""Format and result of an answer in SQL.

Source: the format of SkyRL-SQL (Liu et al., 2025): think, ask the database, think again, …, and give the solution.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from skyrl_gym.envs.tags import all_between, first_between
from skyrl_gym.queries import QueryError, Table, run_query

SECONDS = 30.0
Match = Literal["exact", "set"]

SOLUTION, END_OF_SOLUTION = "<solution>", "</solution>"
TAGS_OF_OTHERS = re.compile(r"</?(?:think|sql|observation)\b", re.IGNORECASE)
ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)


def verify_format_and_extract(output: str) -> tuple[bool, list[str] | None, str | None, None]:
    """Whether a conversation keeps to the format, its thoughts and its solution.

    One `<solution>` and after it one `</solution>`, with none of the other tags in between; a thought at least; and a
    thought first after every observation. The last value is there for those who unpack four.
    """
    invalid = (False, None, None, None)
    before, _, rest = output.partition(SOLUTION)
    if output.count(SOLUTION) != 1 or rest.count(END_OF_SOLUTION) != 1:
        return invalid
    solution = rest.partition(END_OF_SOLUTION)[0]
    if TAGS_OF_OTHERS.search(solution):
        return invalid
    thoughts = [thought.strip() for thought in all_between(output, "<think>", "</think>")]
    after_observations = before.split("</observation>")[1:]
    if not thoughts or not all(text.lstrip().startswith("<think>") for text in after_observations):
        return invalid
    return True, thoughts, solution.strip(), None


def conversation_of(replies: Sequence[str]) -> str:
    """What the model wrote, with empty observations in between: what databases answered is not graded."""
    return "<observation></observation>".join(replies)


def compute_score(output: str, ground_truth: str, db_file: Path, match: Match = "exact") -> float:
    """-1 for a wrong format, 1 if the solution gives what `ground_truth` gives, else 0.

    Raises:
        ValueError: the database does not answer the ground truth, so that nobody can tell.
    """
    is_valid, _, solution, _ = verify_format_and_extract(output)
    if not is_valid or solution is None:
        return -1.0
    try:
        expected = run_query(db_file, ground_truth, SECONDS)
    except QueryError as error:
        raise ValueError(f"the right query fails on {db_file}: {error}; {ground_truth}") from error
    try:
        found = run_query(db_file, solution, SECONDS)
    except QueryError:
        return 0.0
    return float(is_same(found, expected, match, is_ordered=has_order(ground_truth)))


def is_same(found: Table, expected: Table, match: Match, *, is_ordered: bool) -> bool:
    """Whether two results are the same: row for row where the order counts, else each row as often as in the other.

    `set`: only which rows there are, as the benchmarks Spider and BIRD have it.
    """
    if match == "set":
        return set(found.rows) == set(expected.rows)
    if is_ordered:
        return list(found.rows) == list(expected.rows)
    return Counter(found.rows) == Counter(expected.rows)


def has_order(query: str) -> bool:
    """Whether a query orders its result, and not only something inside parentheses, a text or a comment."""
    return ORDER_BY.search(_outside(query)) is not None


def _outside(query: str) -> str:
    """What stands outside of parentheses, quotes and comments."""
    kept: list[str] = []
    depth = 0
    position = 0
    while position < len(query):
        char = query[position]
        end = _END_OF.get(query[position : position + 2]) or _END_OF.get(char)
        if end is not None:
            found = query.find(end, position + 1)
            position = len(query) if found < 0 else found + len(end)
            kept.append(" ")
            continue
        depth += (char == "(") - (char == ")")
        if depth == 0:
            kept.append(char)
        position += 1
    return "".join(kept)


_END_OF = {"'": "'", '"': '"', "`": "`", "[": "]", "--": "\n", "/*": "*/"}


def extract_query(reply: str) -> str | None:
    """The query that a reply asks: its first `<sql>…</sql>`; None without one."""
    query = first_between(reply, "<sql>", "</sql>")
    return None if query is None else query.strip()
