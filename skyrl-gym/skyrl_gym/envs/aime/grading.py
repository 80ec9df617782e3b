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

# The normalisation of Lewkowycz et al. 2022 (Minerva), appendix D. The order matters.
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", r"\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges"),
    *("students", "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITTEN = (
    (re.compile(r".*?(\$.*?\$).*"), r"\1"),  # the first formula of a line, without the words around it
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


class Score(TypedDict):
    """A graded reply. score: 1 or -1. acc: True if the answer is right. pred: the normalised answer, if any."""

    score: float
    acc: bool
    pred: str | None


def normalize_answer(answer: str) -> str:
    r"""Remove units, words, ``$``, boxes, a leading ``x =`` and the commas of a number from an answer."""
    answer = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    for pattern, template in _REWRITTEN:
        answer = pattern.sub(template, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    is_integer = digits.isascii() and digits.isdigit()  # "²" is a digit too, but not of an integer
    return (digits if is_integer else answer).strip()


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
    """Compare the last ``Answer: …`` of the last 300 characters, normalised; ``[INVALID]`` without one."""
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
