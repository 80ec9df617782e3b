r"""Grading of competition problems as in DAPO: +1 or -1 for the answer at the end of the reply."""

import re
from collections.abc import Mapping
from typing import TypedDict

from skyrl_gym import maths
from skyrl_gym.maths import MINUS_SIGNS, Grade, Grader, last_boxed
from skyrl_gym.tools.calls import strip_thoughts

END_CHARS = 300
BOX_END_CHARS = 100
INVALID = "[INVALID]"

_ANSWER = re.compile(r"Answer[*_]*\s*:\s*((?:(?!<(?:[|/｜]|[A-Za-z_]+>))[^\n])+)", re.IGNORECASE)
"""The text of an answer, up to the end of the line, a special token or a tag. A plain `<`, as in ``x < 5``, is kept."""
_DELIMITER = re.compile(r"\\[()\[\]]")  # \(…\) and \[…\] are $…$
_FORMULA = re.compile(r"([^$]*)\$([^$]*)\$([^$]*)")
_WORDS = re.compile(
    r"(?:(?!\b(?:not|never|neither|nor|no|or|and|less|more|least|most|than|except|between|minus|negative|plus|times|over"
    r"|hundred|thousand|million|billion|trillion|dozens?|percent|pct|half|halves|thirds?|quarters?|squared|cubed"
    r"|factorial|pi|base|modulo|mod|cannot|wrong|incorrect|false|impossible|too|fails?|nearly|almost|up\s+to|twice|divided"
    r"|multiplied|(?:square|cube|root|inverse|reciprocal|multiple|divisor|factor|log|sin|cos|tan)s?\s+of"
    r"|(?:under|below|above|double|triple)(?=\s+-?\d))\b)[^\W\d_]|[\s.,:;()]|'(?!t\b))*",
    re.IGNORECASE,
)
"""Words around a formula or number that do not change its value."""
_SENTENCE = re.compile(rf"({_WORDS.pattern})(?<![^\s(])(-?\d[\d,]*(?:\.\d+)?)(?![^\s.,;:)])({_WORDS.pattern})", re.I)
_VERB = re.compile(r"\b(?:is|are|equals?)\b:?|:", re.IGNORECASE)
_MARKDOWN = re.compile(r"^[\s*_]+|[\s*_.]+$")
_OR = re.compile(r"\bor\b")
_EQUALS = re.compile(r"(?<![<>!:])=")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|\\,|,\\!|\\ | )\d{3})+(?!\d)", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)
_PADDED = re.compile(r"0+\d+", re.ASCII)

# The normalization of Lewkowycz et al. 2022 (Minerva), appendix D, with two differences. It deletes whole words, never
# letters inside other words, so `ft` in `\left` and the variable of `a - b` survive. And it never joins numbers.
_UNITS = (
    r"(?:square|ways|integers|dollars|mph|inches|ft|hours|km|units|sue|points|feet|minutes|digits|cents|degrees|cm|gm"
    r"|pounds|meters|meals|edges|students|children\s*tickets|multiples)(?![A-Za-z])"
)
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox)"
_WRITTEN = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])"), ""),
    (re.compile(r"(?<!\\)\\[,;:! ]|~"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([^\s{\\])\s*"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\})\s*([^\s{\\])"), r"\1{\2}"),
    (re.compile(r"sqrt\s*([^\s{(\[])"), r"sqrt{\1}"),
    (re.compile(rf",?\s*{_TEXT}\{{\s*and\s*\}}"), ","),
    (re.compile(r"\\(?:[lc]?dots[cbm]?)(?![A-Za-z])|\.\.\.|…"), r"\\dots "),
    (re.compile(rf"^({_TEXT}\{{)?\s*an?\s+(?=[A-Za-z]{{3,}}(?:[\s-]+[A-Za-z]{{2,}})*\s*\}}?$)"), r"\1"),
)
"""Notation replaced in every kind of answer."""
_DELETED = (
    re.compile(rf"\s*{_TEXT}\{{\s*(?:(?:(?:{_UNITS}|m|s|th)\s*)*\.?)\s*\}}(?:\^\{{?[23]\}}?)?"),
    re.compile(rf"(?<![A-Za-z0-9\\^_{{(]){_UNITS}"),
    re.compile(r"\^\s*\{?\\circ\}?|°"),
    re.compile(r"\\dots\s*$"),
)
"""Units and degrees."""
_GLUED_UNIT = re.compile(rf"(?<=\d){_UNITS}\s*\.?$")
_UNWRAPPED = (
    *((re.compile(rf"{_TEXT}\{{([^{{}}]*)\}}"), r"\1"),) * 2,  # \text{\textbf{7}}
    (re.compile(r"(?<![\d.])\\overline\{(.*?)\}"), r"\1"),  # 0.\overline{3} is not 0.3
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r'(?<!\\)["\s]+(?!\d)|(?<!\d)["\s]+'), ""),
)


class Score(TypedDict):
    """A graded reply. score: 1 or -1. acc: True if the answer is right. pred: the normalized answer, if any."""

    score: float
    acc: bool
    pred: str | None


def normalize_answer(answer: str, *, keeps_units: bool = False) -> str:
    r"""Strip units, ``$``, boxes, a leading ``x =`` and thousands commas from an answer, and unify its LaTeX.

    Units must be separate words or ``\text{…}``: ``3 km`` is 3, but ``3km`` may be the product of 3, k and m.

    >>> normalize_answer(r"$x = \frac12$")
    '\\frac{1}{2}'
    >>> normalize_answer("1,234 dollars")
    '1234'
    >>> normalize_answer("3km")
    '3km'
    """
    answer = _last_side(_MARKDOWN.sub("", _DELIMITER.sub("$", answer.translate(MINUS_SIGNS))))
    answer = _THOUSANDS.sub(lambda number: "".join(_DIGITS.findall(number[0])), answer)
    numbers = _DIGITS.findall(answer)
    formula = _FORMULA.fullmatch(answer)
    if formula is not None and _WORDS.fullmatch(formula[1] + " " + formula[3]):
        answer = formula[2]  # drop the words around it
    answer = answer.replace(".$", "$").replace(r"\$", "")
    for pattern, template in _WRITTEN:
        answer = pattern.sub(template, answer)
    for pattern in () if keeps_units else _DELETED:
        answer = pattern.sub("", answer)
    for pattern, template in _UNWRAPPED:
        answer = pattern.sub(template, answer)
    answer = answer.replace("$", "").strip(" .")
    is_integer = _DIGITS.fullmatch(answer) is not None
    return " ".join(numbers) if is_integer and answer not in numbers else answer  # 4 dollars 2 is not 42


def _last_side(answer: str) -> str:
    """Return the last side of an equation, or the whole answer if the sides are different numbers or alternatives."""
    *sides, last = _EQUALS.split(answer)
    numbers = {side.strip(" $.") for side in (*sides, last) if _DIGITS.fullmatch(side.strip(" $."))}
    return answer if len(numbers) > 1 or _OR.search("=".join(sides)) else last


def find_result(sentence: str) -> str:
    """Return the result that a sentence states: its only number, or the text after its only "is", "are" or colon.

    A sentence of any other form is returned unchanged.

    >>> find_result("So there are 42 ways.")
    '42'
    """
    if number := _SENTENCE.fullmatch(_MARKDOWN.sub("", sentence.translate(MINUS_SIGNS))):
        return number[2]
    verbs = list(_VERB.finditer(sentence))
    return sentence[verbs[0].end() :] if len(verbs) == 1 else sentence


def compute_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> Score:
    r"""Return score 1 for a correct answer, -1 for a wrong or missing one.

    By default the answer is the last ``Answer: …`` in the last 300 characters, compared after `normalize_answer`. With
    `strict_box_verify` it is the last ``\boxed{…}`` in the last 100 characters, compared verbatim.

    >>> compute_score("Six times seven.\nAnswer: $42$", "42")
    {'score': 1.0, 'acc': True, 'pred': '42'}
    """
    grader = grade_strict_box if strict_box_verify else grade_minerva
    grade = grader(solution_str, str(ground_truth))
    return Score(score=to_reward(grade), acc=grade.is_correct, pred=grade.answer)


def to_reward(grade: Grade) -> float:
    """Return +1 for a correct grade, else -1."""
    return 1.0 if grade.is_correct else -1.0


def grade_minerva(reply: str, ground_truth: str) -> Grade:
    """Compare the last ``Answer: …`` in the last 300 characters, normalized. Without one, the answer is ``[INVALID]``.

    Thoughts are ignored. A ground truth with leading zeros, as in some copies of AIME, is a number: 073 is 73.
    """
    answers = _ANSWER.findall(strip_thoughts(reply)[-END_CHARS:])
    if not answers:
        return Grade(INVALID, False)
    forms = {_GLUED_UNIT.sub("", answers[-1]), answers[-1]}
    truths = {normalize_answer(ground_truth), normalize_answer(ground_truth, keeps_units=True)}
    truths |= {truth.lstrip("0") or "0" for truth in truths if _PADDED.fullmatch(truth)}
    found = {normalize_answer(form) for form in forms} | {normalize_answer(answers[-1], keeps_units=True)}
    return Grade(normalize_answer(answers[-1]), not truths.isdisjoint(found - {""}))


def grade_strict_box(reply: str, ground_truth: str) -> Grade:
    r"""Compare the last ``\boxed{…}`` in the last 100 characters verbatim."""
    answer = last_boxed(strip_thoughts(reply)[-BOX_END_CHARS:])
    return Grade(answer, answer is not None and answer == ground_truth)


GRADERS: Mapping[str, Grader] = {"minerva": grade_minerva, "strict_box": grade_strict_box, "math_verify": maths.grade}
"""The values of ``environment.skyrl_gym.aime.grader``."""
