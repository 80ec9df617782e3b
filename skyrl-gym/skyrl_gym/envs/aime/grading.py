r"""Grading of competition problems as in DAPO: +1 or -1 for the answer at the end of the reply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypedDict

from skyrl_gym import maths
from skyrl_gym.maths import Grade, Grader, last_boxed

END_CHARS = 300
BOX_END_CHARS = 100
INVALID = "[INVALID]"

_ANSWER = re.compile(r"Answer\s*:\s*([^\n<]+)", re.IGNORECASE)
_DELIMITER = re.compile(r"\\[()\[\]]")  # \(…\) and \[…\] are $…$
_FORMULA = re.compile(r"([^$]*)\$([^$]*)\$([^$]*)")
_WORDS = re.compile(r"(?:(?!\b(?:not|or|and|less|more|hundred|thousand|million|billion)\b)[^\W\d_]|[\s.,:;'()])*")
"""The words around a formula that do not change its value."""
_MARKDOWN = re.compile(r"^[\s*_]+|[\s*_.]+$")
_OR = re.compile(r"\bor\b")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|\\,|,\\!|\\ | )\d{3})+(?!\d)", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)

# The normalization of Lewkowycz et al. 2022 (Minerva), appendix D. The order matters.
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", r"\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges"),
    *("students", "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", "°", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITTEN = (
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


class Score(TypedDict):
    """A graded reply. score: 1 or -1. acc: True if the answer is right. pred: the normalized answer, if any."""

    score: float
    acc: bool
    pred: str | None


def normalize_answer(answer: str) -> str:
    r"""Remove units, words, ``$``, boxes, a leading ``x =`` and the commas of a number from an answer."""
    answer = _last_side(_MARKDOWN.sub("", _DELIMITER.sub("$", answer)))
    answer = _THOUSANDS.sub(lambda number: "".join(_DIGITS.findall(number[0])), answer)
    numbers = _DIGITS.findall(answer)
    formula = _FORMULA.fullmatch(answer)
    if formula is not None and _WORDS.fullmatch(formula[1] + " " + formula[3]):
        answer = formula[2]  # without the words around it
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    for pattern, template in _REWRITTEN:
        answer = pattern.sub(template, answer)
    answer = answer.replace("$", "").strip(" .")
    is_integer = _DIGITS.fullmatch(answer) is not None
    return " ".join(numbers) if is_integer and answer not in numbers else answer  # 4 dollars 2 is not 42


def _last_side(answer: str) -> str:
    """Return the last side of an equation; the whole answer if its sides are different numbers or alternatives."""
    *sides, last = answer.split("=")
    numbers = {side.strip(" $.") for side in (*sides, last) if _DIGITS.fullmatch(side.strip(" $."))}
    return answer if len(numbers) > 1 or _OR.search("=".join(sides)) else last


def compute_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> Score:
    r"""Return score 1 for the right answer, -1 for a wrong one or none.

    By default the answer is the last ``Answer: …`` in the last 300 characters, compared after `normalize_answer`. With
    `strict_box_verify` it is the last ``\boxed{…}`` in the last 100 characters, compared verbatim.
    """
    grader = grade_strict_box if strict_box_verify else grade_minerva
    grade = grader(solution_str, str(ground_truth))
    return Score(score=to_reward(grade), acc=grade.is_correct, pred=grade.answer)


def to_reward(grade: Grade) -> float:
    """Return +1 for a correct grade, else -1."""
    return 1.0 if grade.is_correct else -1.0


def grade_minerva(reply: str, ground_truth: str) -> Grade:
    """Compare the last ``Answer: …`` of the last 300 characters, normalized; ``[INVALID]`` without one."""
    answers = _ANSWER.findall(reply[-END_CHARS:])
    if not answers:
        return Grade(INVALID, False)
    answer = normalize_answer(answers[-1])
    return Grade(answer, answer != "" and answer == normalize_answer(ground_truth))


def grade_strict_box(reply: str, ground_truth: str) -> Grade:
    r"""Compare the last ``\boxed{…}`` of the last 100 characters, verbatim."""
    answer = last_boxed(reply[-BOX_END_CHARS:])
    return Grade(answer, answer is not None and answer == ground_truth)


GRADERS: Mapping[str, Grader] = {
    "minerva": grade_minerva,
    "strict_box": grade_strict_box,
    "math_verify": maths.grade,
}
"""The values of ``environment.skyrl_gym.aime.grader``."""
