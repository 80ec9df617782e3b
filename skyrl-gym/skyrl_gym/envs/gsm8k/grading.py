"""Grading of word problems, whose solutions in GSM8K end with a number: ``#### 42``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Literal

from skyrl_gym import maths
from skyrl_gym.maths import Grade, Grader

Method = Literal["strict", "flexible"]

# [0-9], not \d: the strict format allows ASCII digits only, not "٤٢".
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """Return the answer of a reply as written but without commas, or None without an answer.

    strict: the number after the first ``#### ``, exactly: ``#### 42.`` gives ``42.``, and ``#### $42`` nothing.
    flexible: the last token with a digit that looks like a number, without a full stop at its end.
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
    """Return `score` for the right answer, `format_score` for a wrong one, and 0 for none.

    Answers are compared as text, ignoring commas: ``42.0`` is not ``42``.
    """
    grade = _grade(solution_str, str(ground_truth), method)
    if grade.answer is None:
        return 0.0
    return score if grade.is_correct else format_score


def _grade(reply: str, ground_truth: str, method: Method) -> Grade:
    answer = extract_solution(reply, method)
    return Grade(answer, answer is not None and answer == ground_truth.strip().replace(",", ""))


GRADERS: Mapping[str, Grader] = {
    "strict": partial(_grade, method="strict"),
    "flexible": partial(_grade, method="flexible"),
    "math_verify": maths.grade,
}
"""The values of ``environment.skyrl_gym.gsm8k.grader`` and ``….gsm8k_multi_turn.grader``."""
