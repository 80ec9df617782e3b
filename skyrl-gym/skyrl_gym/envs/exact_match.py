"""Exact match for answers to open questions.

Source: the normalization of SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250), except that numbers keep their values (5
is not -5, and 12 is not 1.2) and names keep a final + or # (C++ is not C). Typography is ignored: quotes, dashes,
encodings of accents, full-width letters and subscripts make no difference.
"""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Cf"))
"""Unicode's categories of punctuation and of invisible characters."""
MINUS, POINT, PLUS, SHARP = "\ue000", "\ue001", "\ue004", "\ue005"
"""Stand-ins for punctuation that changes the value of a number, or a name."""
_KEPT = str.maketrans({MINUS: "-", POINT: ".", PLUS: "+", SHARP: "#"})
_ASCII = {code + 0xFEE0: code for code in range(0x21, 0x7F)}
"""ASCII for the full-width forms ＡＢＣ１２."""
_SUBSCRIPT = re.compile(r"(?<=[^\W\d_])[₀-₉]+")
_WRAPPING = " .,:;!?()[]{}\"'“”‘’`*_"


@lru_cache(maxsize=4096)
def is_punctuation(char: str) -> bool:
    """Return True for ASCII punctuation, typographic quotes and dashes, and invisible characters."""
    return char in string.punctuation or char in "−´ʹʻʼ" or unicodedata.category(char) in PUNCTUATION


IN_NUMBERS = (
    (re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:[,\u00a0\u2009\u202f][0-9]{3})+(?![0-9])"), lambda found: _digits(found[0])),
    (re.compile(r"(?<=[^\W\d_])[+#]+(?!\w)"), lambda found: found[0].translate({ord("+"): PLUS, ord("#"): SHARP})),
    (re.compile(r"(?<![\w.)])[-−–](?=[$€£]?\.?[0-9])"), lambda _: MINUS),
    (re.compile(r"(?<![^\W0-9_])(?<!\.)\.(?=[0-9])"), lambda _: POINT),
    (re.compile(r"(?<=[0-9])[^\ue000-\uf8ff](?=[0-9])"), lambda found: " " if is_punctuation(found[0]) else found[0]),
)
COMMA, OR = "\ue002", "\ue003"
SEPARATORS = ((re.compile(r"(?<![0-9]),|,(?![0-9])|[;|/\n•]"), COMMA), (re.compile(r"\b(?:and|or)\b"), OR))
"""Marks between the items of a list."""
MAX_OTHER_WORDS = 20


def normalize_answer(answer: str) -> str:
    """Lowercase an answer, and remove punctuation, articles and redundant spaces.

    Numbers keep their signs and decimal points, and lose thousands commas. Any other punctuation between digits becomes
    a space: 3/4 is not 34.

    >>> normalize_answer("The Eiffel Tower!")
    'eiffel tower'
    >>> normalize_answer("-1,234.5")
    '-1234.5'
    >>> normalize_answer("3/4")
    '3 4'
    """
    text = fold(answer)
    for pattern, replace in IN_NUMBERS:
        text = pattern.sub(replace, text)
    text = "".join(char for char in text if not is_punctuation(char)).translate(_KEPT)
    return " ".join(ARTICLES.sub(" ", text).split())


def fold(text: str) -> str:
    """Fold case, the encoding of accents, full-width letters and subscripts: ``Straße`` is ``STRASSE``, CO₂ is CO2."""
    text = limit_marks(text.translate(_ASCII))
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    return _SUBSCRIPT.sub(lambda found: _digits(found[0]), folded)


def limit_marks(text: str) -> str:
    """Drop combining marks after the 30th in a row. Python normalizes a row of marks in quadratic time.

    Source: the Stream-Safe Text Format of Unicode Standard Annex 15.
    """
    marks = "".join(char for char in set(text) if unicodedata.combining(char))
    return re.sub(rf"([{marks}]{{30}})[{marks}]+", r"\1", text) if marks else text


def _digits(text: str) -> str:
    return "".join(str(unicodedata.digit(char)) for char in text if char.isdigit())


def is_match(answer: str, targets: Sequence[str]) -> bool:
    """Return True if the normalized answer is one of the targets.

    A target that normalizes to nothing, e.g. "A", is compared as written, ignoring case, quotes and brackets.

    >>> is_match("the Eiffel tower.", ["Eiffel Tower", "Tour Eiffel"])
    True
    """
    normalized, plain = normalize_answer(answer), _unwrap(answer)
    return any(
        normalized == expected if (expected := normalize_answer(target)) else plain == _unwrap(target)
        for target in targets
    )


def _unwrap(text: str) -> str:
    return fold(text).strip(_WRAPPING) or fold(text.strip())


def is_mentioned(answer: str, targets: Sequence[str]) -> bool:
    """Return True if a short answer contains one of the targets word for word, and offers no alternatives.

    A short answer has at most `MAX_OTHER_WORDS` more words than the target. It offers alternatives if the target is an
    item of a list, as in "London, Paris, Rome" or "Paris or Rome". "Paris, France" is not a list.

    >>> is_mentioned("It is in Paris, France.", ["Paris"])
    True
    >>> is_mentioned("Paris or Rome", ["Paris"])
    False
    """
    words = _split(answer)
    return any(_is_mentioned(words, [word for word in _split(target) if word != COMMA]) for target in targets)


def _split(text: str) -> list[str]:
    """Return the normalized words of a text, and the marks between them."""
    text = fold(text)
    for pattern, mark in SEPARATORS:
        text = pattern.sub(f" {mark} ", text)
    return normalize_answer(text).split()


def _is_mentioned(words: list[str], target: list[str]) -> bool:
    mention = rf"(?: {COMMA})* ".join(map(re.escape, target))
    found = re.search(rf"(?<= ){mention}(?= )", f" {' '.join(words)} ")
    if found is None:
        return False
    n_others = sum(word not in (COMMA, OR) for word in words) - len(target)
    n_before, n_in = found.string[: found.start()].count(" ") - 1, found[0].count(" ") + 1
    sides = (words[:n_before][::-1], words[n_before + n_in :])
    return n_others <= MAX_OTHER_WORDS and sum(_count_items(side, len(target) + 1) for side in sides) < 2


def _count_items(words: list[str], max_words: int) -> int:
    """Count the short items of a list that starts with a mark. An item after "and" or "or" counts twice."""
    n_items, n_words, weight = 0, 0, 0
    for word in [*words, COMMA]:
        if word not in (COMMA, OR):
            n_words += 1
            if not weight or n_words > max_words:
                break
            continue
        n_items += weight if n_words else 0
        weight = 2 if word == OR or (not n_words and weight == 2) else 1
        n_words = 0
    return n_items


def parse_targets(ground_truth: Any) -> list[str]:
    """Return the accepted answers in a ground truth.

    Raises:
        ValueError: it has none.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, Sequence) or not targets or not all(isinstance(text, str) for text in targets):
        raise ValueError(f"ground_truth={ground_truth!r} must be {{'target': a string or a list of strings}}")
    return list(targets)
