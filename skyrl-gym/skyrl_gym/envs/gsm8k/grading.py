"""Grading of word problems. GSM8K's solutions end with a number: ``#### 42``."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Literal

from skyrl_gym import maths
from skyrl_gym.maths import MINUS_SIGNS, Grade, Grader
from skyrl_gym.tools.calls import strip_thoughts

Method = Literal["strict", "flexible"]

# [0-9], not \d: the strict format allows ASCII digits only, not "٤٢".
_STRICT = re.compile(r"(?<!#)#### (-?[0-9.,]+)([^\n]{0,40})")
_CONTINUED = re.compile(
    r"[^\W_]|[/^]|\s*(?:[-+*/^×·÷,;:±~…]\s*)?(?:\b(?:or|and|to)\s+)?[-+$]?[0-9]"
    r"|\s*(?:hundred|thousand|million|billion|trillion|dozen)\b",
    re.IGNORECASE,
)
"""Text after a number that changes it or adds a second one: ``42/1``, ``42e3``, ``42 000``, ``42 or 43``."""
_OPERATOR = (
    r"[ \t]*(?:[/^×÷·_]|\*(?!\*)|\*\*(?=[0-9])|:(?=[0-9])|\\(?:times|cdot|div)|x(?=[ \t]*[0-9])|times|mod)[ \t]*\{?"
)
_EXPRESSION = re.compile(
    r"\\[dtc]?frac[ \t]*\{[^{}]*\}[ \t]*\{[^{}]*\}|\\sqrt[ \t]*\{[^{}]*\}"
    rf"|[/^]?(?:(?<![\w)])-)?[0-9.,]+(?:[eE][-+]?[0-9]+)?(?:(?:{_OPERATOR}|[ \t](?=[0-9]+/[0-9]))[0-9][0-9.,]*\}}?)*"
    r"(?:k\b|[ \t]+(?:hundred|thousand|million|billion|trillion|dozen)\b)?"
)
"""A number, or a fraction, product or power whose last number is not the answer: ``3 / 4``, ``2**5``, ``5 million``."""
_CURRENCY = r"(?:(?:\b[A-Z]{1,2})?\$|[£¥\u20a0-\u20cf]|\b(?:USD|EUR|GBP|INR|Rs)\b\.?\s?)"
_SIGN = re.compile(
    rf"(?:(?<![\w)])-|{_CURRENCY}\s?-\s?|(?<=[=:(]) ?- |(?<![0-9)]\s)\bminus\s+|\bnegative\s+)"
    rf"(?:\\(?:boxed|text\w*|math\w+)\s*\{{|{_CURRENCY}|[*_{{(\\])*(?=[.,]?[0-9])",
    re.IGNORECASE,
)
"""The sign of a number, with currencies and markup: ``-$5``, ``$-5``, ``-**5**``, ``= - 5``, ``minus 5``.

A minus directly after a number is a subtraction. A minus and a space at the start of a line mark a list item.
"""
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """Return the answer as written but without thousands commas, or None if there is no answer.

    strict: the number after the first ``#### ``, exactly: ``#### 42.`` gives ``42.``, and ``#### $42`` gives None. If
        text follows that changes the number, as in ``#### 42/7`` or ``#### 42 or 43``, it is part of the answer.
    flexible: the last token with a digit that looks like a number, with its sign: ``-$5.`` is -5.

    >>> extract_solution("6 boxes of 7 make #### 1,042")
    '1042'
    >>> extract_solution("#### 42 or 43")
    '42 or 43'
    >>> extract_solution("The loss is -$5.", method="flexible")
    '-5'
    """
    solution_str = solution_str.translate(MINUS_SIGNS)
    if method == "strict":
        found = _STRICT.search(solution_str)
        if found is None:
            return None
        number, rest = found.groups()
        return f"{number}{rest}" if _CONTINUED.match(rest) else _without_commas(number)
    if method == "flexible":
        numbers = (number.rstrip(".,") for number in reversed(_EXPRESSION.findall(_SIGN.sub(" -", solution_str))))
        return next((_without_commas(number) for number in numbers if number.strip("-./^,")), None)
    raise ValueError(f"method={method!r} is unknown; use 'strict' or 'flexible'")


def compute_score(
    solution_str: str, ground_truth: str, method: Method = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for a correct answer, `format_score` for a wrong one, and 0 if there is no answer.

    Answers are compared as text, without thoughts and thousands commas: ``42.0`` is not ``42``.

    >>> compute_score("#### 42", "42")
    1.0
    >>> compute_score("#### 42.0", "42", format_score=0.1)
    0.1
    >>> compute_score("It is 42.", "42")
    0.0
    """
    grade = _grade(solution_str, str(ground_truth), method)
    if grade.answer is None:
        return 0.0
    return score if grade.is_correct else format_score


def _grade(reply: str, ground_truth: str, method: Method) -> Grade:
    answer = extract_solution(strip_thoughts(reply), method)
    return Grade(answer, answer is not None and answer == _without_commas(ground_truth.strip().translate(MINUS_SIGNS)))


def _without_commas(number: str) -> str:
    """Remove thousands commas and a final comma: ``1,234`` is 1234, but ``4,2`` is not 42."""
    number = number.rstrip(",")
    return number.replace(",", "") if _THOUSANDS.match(number) else number


GRADERS: Mapping[str, Grader] = {
    "strict": partial(_grade, method="strict"),
    "flexible": partial(_grade, method="flexible"),
    "math_verify": maths.grade,
}
"""The values of ``environment.skyrl_gym.gsm8k.grader`` and ``….gsm8k_multi_turn.grader``."""
