"""Parsing of replies to tasks. Thoughts, and text before the last "Final Answer:", are not part of the answer."""

import re
from fractions import Fraction

from skyrl_gym.tools.calls import strip_thoughts

FINAL_ANSWER = "Final Answer:"
"""Separator between the reasoning and the answer."""

MAX_ANSWER_CHARS = 20_000
"""The answer must be within this many characters of the end of a reply."""

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d*[1-9]\d*)?", re.ASCII)
MAX_NUMBER_CHARS = 40


def visible_answer(reply: str) -> str:
    """Return the part of a reply that may hold its answer. Empty if a thought is not closed.

    >>> visible_answer("<think>6 · 7</think>It is easy. Final Answer: 42")
    '42'
    """
    return strip_thoughts(reply).rpartition(FINAL_ANSWER)[2][-MAX_ANSWER_CHARS:].strip()


def last_line(answer: str) -> str:
    r"""Return the last line that is neither empty nor a fence, stripped of quotes and emphasis.

    >>> last_line("So:\n```\n**42**\n```")
    '42'
    """
    lines = (line.strip().strip("`*\"' ") for line in reversed(answer.splitlines()))
    return next((line for line in lines if line), "")


def parse_number(text: str) -> Fraction | None:
    """Parse ``-12``, ``1,234``, ``2.5`` or ``-3/4``. Return None for anything else.

    >>> parse_number("1,234")
    Fraction(1234, 1)
    >>> parse_number("-3/4")
    Fraction(-3, 4)
    """
    text = re.sub(r"\s|\$|\\,|\{,\}", "", text.replace("−", "-"))
    if len(text) > MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", ""))
