"""Grade the answer to a word problem: a number, in the way that GSM8K's own solutions end, ``#### 42``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Literal

from skyrl_gym import maths
from skyrl_gym.maths import Grade, Grader

Method = Literal["strict", "flexible"]

# [0-9], not \d: the strict format is one of ASCII digits, and "٤٢" is not in it.
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The number that a reply gives as its answer, as it is written there but without commas; None without one.

    strict: what follows the first ``#### ``, exactly: ``#### 42.`` gives ``42.``, and ``#### $42`` nothing.
    flexible: the last thing with a digit in it that looks like a number. A full stop at its end is the sentence's.
    """
    if method == "strict":
        found = _STRICT.search(solution_str)
        return found[1].replace(",", "") if found else None
    if method == "flexible":
        numbers = (number.rstrip(".,").replace(",", "") for number in reversed(_NUMBER.findall(solution_str)))
        return next((number for number in numbers if number.strip("-.")), None)
    raise ValueError(f"method={method!r} is unknown; use 'strict' or 'flexible'")


def compute_score(
    solution_str: str, ground_truth: str, method: Method = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 for none.

    Answers are compared as text: ``42.0`` is not ``42``. Commas count on neither side.
    """
    found = _grade(solution_str, str(ground_truth), method)
    if found.answer is None:
        return 0.0
    return score if found.is_correct else format_score


def _grade(reply: str, ground_truth: str, method: Method) -> Grade:
    answer = extract_solution(reply, method)
    return Grade(answer, answer is not None and answer == ground_truth.strip().replace(",", ""))


GRADERS: Mapping[str, Grader] = {
    "strict": partial(_grade, method="strict"),
    "flexible": partial(_grade, method="flexible"),
    "math_verify": maths.grade,
}
"""What ``environment.skyrl_gym.gsm8k.grader`` and ``….gsm8k_multi_turn.grader`` choose from."""
