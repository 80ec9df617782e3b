r"""Parsing of replies: find the legal move that a reply names, if any.

The answer is the content of the last ``\boxed{}`` or ``<action></action>``, or else the last line that is not empty, a
fence, or a reason such as "Explanation: it stops d4".
Thoughts are dropped: text before ``</think>``, or after a ``<think>`` that is never closed. An answer names a move by
its whole text, by its number in the prompt, or by mentioning it as a separate word. The last mention that the reply
declares as its move counts, as in "my move is c3, to stop d4". If there is no declaration, the last mention counts.
Negated mentions do not count, as in "do not call". Illegal moves are mentions too: a reply that settles on one names no
move, however many legal moves it discusses. A reply that lists several moves, as in "c3 or d4", names no move either.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

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
"""Words before a mention that negate it."""
MAX_NEGATION = 80
"""Number of characters before a mention that are searched for a negation or a declaration."""
_DECLARATION = re.compile(
    r"(?:(?:\b(?:my|the|our)\s+|(?:^|[.!?:;,]\s)\W*)(?:(?:final|best|chosen|next)\s+)*(?:answer|move|action|choice)"
    r"\s*(?:is|will be|:|=)\s*:?"
    r"|\b(?:I|we)(?:['’]ll|\s+will|\s+shall)?(?:\s+(?:now|then|therefore|thus))*"
    r"(?:\s+(?:play|choose|pick|take|select|go\s+with|go\s+for|place|put))?)"
    r"(?:\s*\b(?:to|the|a|at|on|in|my|stone|piece|cell|square|play|choose|move|action)\b)*[\W_]*$",
    re.IGNORECASE,
)
"""Words before a mention that declare it as the reply's move."""
_CONDITION = re.compile(r"\b(?:if|when|after|once|suppose|unless|would|could|might|may)\b[^.!?;]*$", re.IGNORECASE)
"""Words that make a declaration a hypothesis, as in "if I play c3"."""
_REASON = re.compile(
    r"\W*\b(?:because|since|as|to|which|it|block\w*|stop\w*|threat\w*|connect\w*|prevent\w*)\b", re.IGNORECASE
)
"""Words after a mention at the start of an answer that give the reason for it."""
_DECISION = (
    r"(?:(?!\b(?:if|when|after|once|unless)\b).)*[,;]\s*(?:so\s+|therefore\s+)?"
    r"(?:I|we)(?:['’]ll|\s+will)?\s+(?:play|choose|pick|take|select|place|put)\b"
)
_REASON_LINE = re.compile(
    r"[\W_]*(?:(?:explanation|rationale|justification|reason(?:ing)?)[*_]*\s*:"
    rf"|(?:because\b|(?:it|this)\s+(?:also\s+)?(?:block|stop|threat|connect|prevent)\w*\b)(?!{_DECISION}))",
    re.IGNORECASE,
)
"""The start of a line that gives the reason for a move on a line before, but not "Because it wins, I play c3"."""
_LIST = re.compile(r"[\W_]*(?:\b(?:or|and|vs|versus|either|maybe|perhaps|possibly)\b[\W_]*)*", re.IGNORECASE)
"""Text between two moves of a list."""
_WORD_MOVES = frozenset(("bet", "call", "check", "fold", "hit", "pass", "raise", "stand"))
"""Moves of card games. If some are legal, all other words here are illegal moves."""
_AROUND_NUMBER = "()[]{}<>\"'`*_~$|\\"

Way = Literal["text", "number", "mention", "none"]


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed reply, e.g. ``ParsedAnswer(answer="I play b1.", move=<b1>, way="mention")``.

    answer: the part of the reply that holds the answer.
    move: the legal move that it names, or None.
    way: how the move was found.
    """

    answer: str
    move: Move | None
    way: Way


def parse_answer(reply: str, legal: LegalMoves) -> ParsedAnswer:
    """Find the legal move that `reply` names. Never raises."""
    answer = final_answer(reply)
    text = " ".join(answer.split())
    if len(text) > MAX_ANSWER_LENGTH:
        text = text[-MAX_ANSWER_LENGTH:].partition(" ")[2]
    if latex := _LATEX_TEXT.fullmatch(text):
        text = latex[1].strip()
    text = _LATEX_ESCAPE.sub(r"\1", text)
    if not text:
        return ParsedAnswer(answer, None, "none")
    if move := _find_by_name(text, legal):
        return ParsedAnswer(answer, move, "text")
    bare = text.rstrip(".,;:!? " + _AROUND_NUMBER).lstrip(_AROUND_NUMBER)
    number = _NUMBER.fullmatch(bare) if len(bare) <= 80 else None  # "3", "(3)." or "Index 3"
    if number and (move := legal.by_number.get(int(number[1]))):
        return ParsedAnswer(answer, move, "number")
    if move := _find_mention(text, legal):
        return ParsedAnswer(answer, move, "mention")
    return ParsedAnswer(answer, None, "none")


def final_answer(reply: str) -> str:
    """Return the part of a reply that holds the answer. Empty if there is none."""
    visible = strip_thoughts(reply)[-MAX_REPLY_TAIL:]
    end = visible.rfind("</action>")
    start = visible.rfind("<action>", 0, max(end, 0))
    action = (start, visible[start + len("<action>") : end]) if start >= 0 else (-1, "")
    marked = max(_last_box(visible), action)
    if marked[0] >= 0:
        return marked[1].strip()
    lines = [line.strip() for line in visible.splitlines() if line.strip(" \t\f\v`~")]
    return next((line for line in reversed(lines) if not _REASON_LINE.match(line)), lines[-1] if lines else "")


def _last_box(text: str) -> tuple[int, str]:
    """Return the start and content of the last closed ``\boxed{}``, the inner one if nested. -1 if there is none."""
    opened: list[re.Match[str]] = []
    last = (-1, "")
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and len((start := opened.pop())[0]) > 1:
            last = max(last, (start.start(), text[start.end() : brace.start()]))
    return last


def _find_by_name(text: str, legal: LegalMoves) -> Move | None:
    by_name = legal.by_name
    return by_name.get(text) or (None if legal.is_case_sensitive else by_name.get(lower_ascii(text)))


class _Mention(NamedTuple):
    """A move in an answer. `move` is None for an illegal move."""

    start: int
    end: int
    move: Move | None


def _find_mention(text: str, legal: LegalMoves) -> Move | None:
    """Return the move of the mention that counts, or None if there is none, or it is illegal or part of a list.

    In "b2 looks good, but my move is c3, to stop d4", all three moves are mentions. "my move is" declares c3, so c3
    counts although d4 is last. In "not b2. c3", b2 is negated, so it does not count. In "c3 or d4", the last mention is
    part of a list, so the reply does not choose.
    """
    mentions = [mention for mention in _mentions(text, legal) if not _matches_before(_NEGATION, text, mention.start)]
    declared = [index for index, mention in enumerate(mentions) if _is_declared(text, mention)]
    chosen = declared[-1] if declared else len(mentions) - 1
    for first, second in pairwise(mentions[max(0, chosen - 1) : chosen + 2]):
        if first.move != second.move and _LIST.fullmatch(text, first.end, second.start):
            return None
    return mentions[chosen].move if mentions else None


def _mentions(text: str, legal: LegalMoves) -> list[_Mention]:
    """Return the moves in `text` that are separate words, in order. If they overlap, the longest wins."""
    folded = text if legal.is_case_sensitive else lower_ascii(text)
    found = [
        _Mention(start, start + len(name), move)
        for name, move in legal.by_name.items()
        if len(name) > 1 or not name.isalpha() or " " not in text  # in a sentence, "a" is a word
        for within in {text, folded}
        for start in _find_words(within, name)
    ]
    found += [_Mention(*word.span(), None) for word in _illegal_moves(legal).finditer(folded)]
    kept: list[_Mention] = []
    for mention in sorted(set(found), key=lambda mention: (mention.start, -mention.end, mention.move is None)):
        is_word = _is_opened(text, mention.start) and _is_closed(text, mention.end)
        if is_word and (not kept or mention.start >= kept[-1].end):
            kept.append(mention)
    return kept


def _find_words(text: str, name: str) -> Iterator[int]:
    start = text.find(name)
    while start >= 0:
        yield start
        start = text.find(name, start + len(name))


def _illegal_moves(legal: LegalMoves) -> re.Pattern[str]:
    """Return a pattern for words that look like moves: the form of a legal move with a digit, such as b2 and c3."""
    names = legal.by_name if legal.is_case_sensitive else {lower_ascii(name) for name in legal.by_name}
    forms = {
        "".join(r"\d" if char.isdigit() else _letters(char) for char in name)
        for name in names
        if " " not in name and re.search(r"\d", name) and not name.isdigit()
    }
    words = _WORD_MOVES if not _WORD_MOVES.isdisjoint(map(lower_ascii, names)) else ()
    return re.compile("|".join([*sorted(forms, key=len, reverse=True), *words]) or r"(?!)", re.ASCII)


def _letters(char: str) -> str:
    if not char.isalpha() or not char.isascii():
        return re.escape(char)
    return "[a-z]" if char.islower() else "[A-Z]"


def _is_declared(text: str, mention: _Mention) -> bool:
    if mention.start == len(text) - len(text.lstrip()) and _REASON.match(text, mention.end):
        return True
    return _matches_before(_DECLARATION, text, mention.start) and not _matches_before(_CONDITION, text, mention.start)


def _matches_before(pattern: re.Pattern[str], text: str, position: int) -> bool:
    return pattern.search(text[max(0, position - MAX_NEGATION) : position]) is not None


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
