r"""Parsing of replies: find the legal move that a reply names, if any.

The answer is the content of the last ``\boxed{}`` or ``<action></action>``, or else the last line that is not empty.
Thoughts are not answers: text before ``</think>``, or after a ``<think>`` that is never closed, is dropped. An answer
names a move by its whole text, by its number in the prompt, or by mentioning it as a separate word; the last mention
counts, unless it is negated, as in "do not call". An empty answer names no move.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from skyrl_gym.envs.openspiel.moves import LegalMoves, Move, lower_ascii
from skyrl_gym.tools.calls import strip_thoughts

MAX_REPLY_TAIL = 20_000
"""Number of characters at the end of a reply that are searched for the answer."""

MAX_ANSWER_LENGTH = 2_000
"""Number of characters at the end of an answer that are searched for a move."""

MAX_WRAP = 12
"""Maximum number of quotes, brackets and marks on one side of a move."""

_OPENING = frozenset("([{<\"'“‘«`*_~$\\|")
_CLOSING = frozenset(")]}>\"'”’»`*_~$\\|.,;:!?。，；：！？")
_BRACES = re.compile(r"\\boxed\s*\{|[{}]")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|texttt|mathrm|mathbf|mathtt)\s*\{(.*)\}", re.DOTALL)
_LATEX_ESCAPE = re.compile(r"\\([#_&%$ ])")
_NUMBER = re.compile(
    r"(?:(?:the )?(?:my |final |best |chosen |legal )?(?:answer|action|move|index|number|choice|option)"
    r"(?: (?:is|number|index))?[:=]? ?)?#?(0|[1-9][0-9]{0,8})",
    re.ASCII | re.IGNORECASE,
)
_NEGATION = re.compile(
    r"(?:\b(?:not|never|neither|nor|avoid|without|except|instead of|rather than|over|refuse to)|n['’]t)"
    r"(?: (?:to|be|do|go|going|want|like|choose|pick|play|playing|select|take|make|for|with|on|the|a|an|any|my|move"
    r"|action|option))*(?: \S+,? (?:or|nor))*[^\w\s]* ?[^\w\s]*$",
    re.IGNORECASE,
)
"""The words before a mention that negate it."""
MAX_NEGATION = 80
"""Number of characters before a mention that are searched for a negation."""
_AROUND_NUMBER = "()[]{}<>\"'`*_~$|\\"

Way = Literal["text", "number", "mention", "none"]


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed reply, e.g. ``ParsedAnswer(answer="I play b1.", move=<b1>, way="mention")``.

    answer: the part of the reply that holds the answer.
    move: the legal move that it names, or None.
    way: the way in which the move was found.
    """

    answer: str
    move: Move | None
    way: Way


def parse_answer(reply: str, legal: LegalMoves) -> ParsedAnswer:
    """Find the legal move that `reply` names. Never raises."""
    answer = final_answer(reply)
    text = _as_text(answer)
    if not text:
        return ParsedAnswer(answer, None, "none")
    if move := _find_by_name(text, legal):
        return ParsedAnswer(answer, move, "text")
    if move := _find_by_number(text, legal):
        return ParsedAnswer(answer, move, "number")
    if move := _find_mention(text, legal):
        return ParsedAnswer(answer, move, "mention")
    return ParsedAnswer(answer, None, "none")


def final_answer(reply: str) -> str:
    """Return the part of a reply that holds the answer; empty if there is none."""
    visible = strip_thoughts(reply)[-MAX_REPLY_TAIL:]
    marked = max(_last_box(visible), _last_action(visible))
    if marked[0] >= 0:
        return marked[1].strip()
    return next((line.strip() for line in reversed(visible.splitlines()) if line.strip()), "")


def _last_box(text: str) -> tuple[int, str]:
    """Return the start and the content of the last closed ``\\boxed{}``, the inner of nested ones; -1 without one."""
    opened: list[re.Match[str]] = []
    last = (-1, "")
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and len((start := opened.pop())[0]) > 1:
            last = max(last, (start.start(), text[start.end() : brace.start()]))
    return last


def _last_action(text: str) -> tuple[int, str]:
    """Return the start and the content of the last closed ``<action>``; -1 without one."""
    end = text.rfind("</action>")
    start = text.rfind("<action>", 0, max(end, 0))
    return (start, text[start + len("<action>") : end]) if start >= 0 else (-1, "")


def _as_text(answer: str) -> str:
    """Put an answer on one line, remove LaTeX, and truncate a long answer to the words at its end."""
    words = answer.split()
    text = " ".join(words)
    if len(text) > MAX_ANSWER_LENGTH:
        text = text[-MAX_ANSWER_LENGTH:].partition(" ")[2]
    if latex := _LATEX_TEXT.fullmatch(text):
        text = latex[1].strip()
    return _LATEX_ESCAPE.sub(r"\1", text)


def _find_by_name(text: str, legal: LegalMoves) -> Move | None:
    by_name = legal.by_name
    return by_name.get(text) or (None if legal.is_case_sensitive else by_name.get(lower_ascii(text)))


def _find_by_number(text: str, legal: LegalMoves) -> Move | None:
    """Return the move if `text` is nothing but its number, as in ``3``, ``(3).`` or ``Index 3``."""
    bare = text.rstrip(".,;:!? " + _AROUND_NUMBER).lstrip(_AROUND_NUMBER)
    number = _NUMBER.fullmatch(bare) if len(bare) <= 80 else None
    return legal.by_number.get(int(number[1])) if number else None


def _find_mention(text: str, legal: LegalMoves) -> Move | None:
    """Return the last move that `text` mentions; of several that end at the same position, the longest."""
    texts = [text] if legal.is_case_sensitive else [text, lower_ascii(text)]
    found = [
        (_last_mention(within, name), len(name), move)
        for within in texts
        for name, move in legal.by_name.items()
        if len(name) > 1 or not name.isalpha() or " " not in text  # in a sentence, "a" is a word
    ]
    end, _, move = max(found, key=lambda mention: mention[:2], default=(-1, 0, None))
    return move if end >= 0 else None


def _last_mention(text: str, name: str) -> int:
    """Return the end of the last mention of `name` as a separate word that is not negated; -1 without one."""
    start = text.rfind(name)
    while start >= 0:
        end = start + len(name)
        is_word = _is_opened(text, start) and _is_closed(text, end)
        if is_word and not _NEGATION.search(text, max(0, start - MAX_NEGATION), start):
            return end
        start = text.rfind(name, 0, end - 1)
    return -1


def _is_opened(text: str, start: int) -> bool:
    """Return True if only quotes, brackets and marks separate `start` from a space, a colon or the text's start."""
    for before in range(start - 1, start - 2 - MAX_WRAP, -1):
        if before < 0 or text[before] in " :：":
            return True
        if text[before] not in _OPENING:
            return False
    return False


def _is_closed(text: str, end: int) -> bool:
    """Return True if only quotes, brackets and punctuation separate `end` from the end of the text or a space."""
    for after in range(end, end + 1 + MAX_WRAP):
        if after >= len(text) or text[after] == " ":
            return True
        if text[after] not in _CLOSING:
            return False
    return False
