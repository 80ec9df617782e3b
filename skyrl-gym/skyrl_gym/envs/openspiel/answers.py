r"""Answers: which legal move a reply names, if any.

The answer is what stands in the last ``\boxed{}`` or ``<action></action>``, or else the last line with anything in it.
Thoughts are not answers: what comes before ``</think>``, or after a ``<think>`` that is never closed, is dropped. In
the answer, a move is found by its whole text, by the number that the prompt shows beside it, or as the last move that
is mentioned as a word of its own. An empty answer names no move.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from skyrl_gym.envs.openspiel.moves import LegalMoves, Move, lower_ascii

MAX_REPLY_TAIL = 20_000
"""Characters at the end of a reply in which the answer is looked for."""

MAX_ANSWER_LENGTH = 2_000
"""Characters at the end of an answer in which a move is looked for."""

MAX_WRAP = 12
"""Quotes, brackets and marks that may stand on one side of a move."""

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
_AROUND_NUMBER = "()[]{}<>\"'`*_~$|\\"

Way = Literal["text", "number", "mention", "none"]


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """What a reply came to, e.g. ``ParsedAnswer(answer="I play b1.", move=<b1>, way="mention")``.

    answer: the part of the reply that was read.
    move: the legal move that it names; None when it names none.
    way: how the move was found.
    """

    answer: str
    move: Move | None
    way: Way


def parse_answer(reply: str, legal: LegalMoves) -> ParsedAnswer:
    """The legal move that `reply` names. Nothing that a model writes raises."""
    answer = final_answer(reply)
    text = _as_text(answer)
    if not text:
        return ParsedAnswer(answer, None, "none")
    if move := _named(text, legal):
        return ParsedAnswer(answer, move, "text")
    if move := _numbered(text, legal):
        return ParsedAnswer(answer, move, "number")
    if move := _mentioned(text, legal):
        return ParsedAnswer(answer, move, "mention")
    return ParsedAnswer(answer, None, "none")


def final_answer(reply: str) -> str:
    """The part of a reply that answers; empty when there is none."""
    spoken = without_thoughts(reply)[-MAX_REPLY_TAIL:]
    marked = max(_last_box(spoken), _last_action(spoken))
    if marked[0] >= 0:
        return marked[1].strip()
    return next((line.strip() for line in reversed(spoken.splitlines()) if line.strip()), "")


def without_thoughts(reply: str) -> str:
    """What a reply says after its thoughts. Of thoughts that never end, nothing is left."""
    return reply.rpartition("</think>")[2].partition("<think>")[0]


def _last_box(text: str) -> tuple[int, str]:
    """Where the last closed ``\\boxed{}`` begins, the inner one of two, and what is in it; -1 when there is none."""
    opened: list[re.Match[str]] = []
    last = (-1, "")
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and len((start := opened.pop())[0]) > 1:
            last = max(last, (start.start(), text[start.end() : brace.start()]))
    return last


def _last_action(text: str) -> tuple[int, str]:
    """Where the last closed ``<action>`` begins, and what is in it; -1 when there is none."""
    end = text.rfind("</action>")
    start = text.rfind("<action>", 0, max(end, 0))
    return (start, text[start + len("<action>") : end]) if start >= 0 else (-1, "")


def _as_text(answer: str) -> str:
    """An answer on one line, out of LaTeX, cut to the words at its end where it is long."""
    words = answer.split()
    text = " ".join(words)
    if len(text) > MAX_ANSWER_LENGTH:
        text = text[-MAX_ANSWER_LENGTH:].partition(" ")[2]
    if latex := _LATEX_TEXT.fullmatch(text):
        text = latex[1].strip()
    return _LATEX_ESCAPE.sub(r"\1", text)


def _named(text: str, legal: LegalMoves) -> Move | None:
    by_name = legal.by_name
    return by_name.get(text) or (None if legal.is_case_sensitive else by_name.get(lower_ascii(text)))


def _numbered(text: str, legal: LegalMoves) -> Move | None:
    """The move whose shown number is all that `text` says, as in ``3``, ``(3).`` or ``Index 3``."""
    bare = text.rstrip(".,;:!? " + _AROUND_NUMBER).lstrip(_AROUND_NUMBER)
    number = _NUMBER.fullmatch(bare) if len(bare) <= 80 else None
    return legal.by_number.get(int(number[1])) if number else None


def _mentioned(text: str, legal: LegalMoves) -> Move | None:
    """The last move that `text` mentions; of moves that end at the same place, the longest."""
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
    """Where the last mention of `name` as a word of its own ends; -1 when there is none."""
    start = text.rfind(name)
    while start >= 0:
        end = start + len(name)
        if _is_opened(text, start) and _is_closed(text, end):
            return end
        start = text.rfind(name, 0, end - 1)
    return -1


def _is_opened(text: str, start: int) -> bool:
    """Whether only quotes, brackets and marks stand between `start` and the beginning, a space or a colon."""
    for before in range(start - 1, start - 2 - MAX_WRAP, -1):
        if before < 0 or text[before] in " :：":
            return True
        if text[before] not in _OPENING:
            return False
    return False


def _is_closed(text: str, end: int) -> bool:
    """Whether only quotes, brackets and the ends of sentences stand between `end` and the end or a space."""
    for after in range(end, end + 1 + MAX_WRAP):
        if after >= len(text) or text[after] == " ":
            return True
        if text[after] not in _CLOSING:
            return False
    return False
