"""The text of a reply in the forms that instructions are checked on: lines, words, sentences, paragraphs."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cached_property

from skyrl_gym.envs.exact_match import limit_marks

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese and Japanese characters. Each counts as a word."""
_UNSPACED = f"{CJK}\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
"""Characters of scripts without spaces between words: also Thai, Lao, Burmese and Khmer."""
_FILLERS = "\u034f\u115f\u1160\u3164\uffa0"
"""Invisible characters outside of the category Cf."""
_VARIATION = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")

_LETTER = re.compile(r"[^\W_]")
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+(?:['’][^\W_{CJK}]+)?")
_BLANK_LINE = re.compile(r"\n\s*\n")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)")
_PROSE_FENCES = ("", "text", "txt", "plaintext", "markdown", "md")
_ITEM = re.compile(r"[ \t]*(?:[*+-]|[0-9]{1,3}[.)]|#{1,6})[ \t]")
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]*_]*+(?=\s|$)|[。！？｡।॥؟۔։።]++[\"'”’»」』)）*_]*+")
_ABBREVIATION = re.compile(
    r"(?:mrs?|ms|mx|dr|prof|rev|gen|col|lt|capt|sgt|sr|jr|st|mt|vs|approx|inc|ltd|co|corp|dept|est|fig|vol"
    r"|(?:[^\W\d_]\.)+[^\W\d_]|(?!i$)[^\W\d_])",
    re.IGNORECASE,
)
"""Words before a full stop that does not end a sentence: titles, initials, ``e.g.``"""


def show(text: str) -> str:
    """Remove invisible characters and surrounding space, and compose accents.

    >>> show("for\\u200bbidden ")
    'forbidden'
    """
    invisible = {ord(char): None for char in set(text) if unicodedata.category(char) == "Cf" or char in _FILLERS}
    text = _VARIATION.sub("", text.translate(invisible)).replace("\r\n", "\n")
    return unicodedata.normalize("NFC", limit_marks(text)).strip()


def fold(text: str) -> str:
    """Ignore case, typographic variants of letters, and the kind and amount of space.

    >>> fold("Ｔｈｅ  STRASSE") == fold("the\\nStraße")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def has_word(text: str) -> bool:
    """Return True if a text has a letter or a digit."""
    return _LETTER.search(text) is not None


class Reply:
    """A reply without its thoughts. Every form is computed when it is first needed, in linear time."""

    def __init__(self, raw: str) -> None:
        self.raw = raw

    @cached_property
    def text(self) -> str:
        """The visible text."""
        return show(self.raw)

    @cached_property
    def folded(self) -> str:
        """The text for comparisons that ignore case."""
        return fold(self.text)

    @cached_property
    def _marks(self) -> str:
        """Combining marks of the text, e.g. vowel signs of Hindi. Python's regular expressions split words at them."""
        return "".join(char for char in set(self.text) | set(self.folded) if unicodedata.category(char)[0] == "M")

    @cached_property
    def words(self) -> list[str]:
        """The words. A number is a word, as are the parts of a compound with a hyphen. ``don't`` is one word."""
        return _WORD.findall(self.text.translate(dict.fromkeys(map(ord, self._marks))))

    @cached_property
    def prose(self) -> str:
        """The text without fenced blocks in a programming language."""
        kept, fence, is_code = [], "", False
        for line in self.text.split("\n"):
            found = _FENCE.match(line)
            if found and not fence:
                fence, is_code = found[1], found[2].casefold() not in _PROSE_FENCES
            elif found and found[1].startswith(fence) and not found[2]:
                fence, is_code = "", False
            elif not is_code:
                kept.append(line)
        return "\n".join(kept)

    def find(self, phrase: str) -> Iterator[re.Match[str]]:
        """Yield the matches of a phrase in `folded` that neither start nor end inside a word."""
        phrase = fold(phrase)
        inside = rf"[^\W_{_UNSPACED}]"
        spaced = re.compile(inside)
        before = rf"(?<!{inside})" if spaced.match(phrase) else ""
        after = rf"(?!{inside}|[{self._marks}])" if self._marks else rf"(?!{inside})"
        return re.finditer(before + re.escape(phrase) + (after if spaced.match(phrase[-1]) else ""), self.folded)

    def paragraphs(self) -> list[str]:
        """Return the blocks between blank lines."""
        return _BLANK_LINE.split(self.text)

    def divide(self, asterisks: str) -> list[str]:
        """Return the parts between dividers, without an empty first and last one. `asterisks` is a quantifier."""
        parts = re.split(rf"(?<!\S)\*{{{asterisks}}}(?!\S)", self.text)
        start = 0 if parts[0].strip() else 1
        return parts[start : len(parts) if parts[-1].strip() else -1]

    def count_sentences(self) -> int:
        """Count the sentences. Blank lines, list items and headings end one too."""
        return sum(_count_in_block(block) for block in _blocks(self.text))


def _blocks(text: str) -> Iterator[str]:
    block: list[str] = []
    for line in text.split("\n"):
        item = _ITEM.match(line)
        if item or not line.strip():
            yield " ".join(block)
            block = []
        block.append(line[item.end() :] if item else line)
    yield " ".join(block)


def _count_in_block(block: str) -> int:
    n_sentences, start = 0, 0
    for end in _SENTENCE_END.finditer(block):
        if end[0].rstrip("\"'”’»)]*_") == "." and end.end() < len(block.rstrip()):
            before = block[max(start, end.start() - 20) : end.start()].split()
            if before and _ABBREVIATION.fullmatch(before[-1].lstrip("\"'“‘«([*_")):
                continue
        n_sentences += has_word(block[start : end.end()])
        start = end.end()
    return n_sentences + has_word(block[start:])
