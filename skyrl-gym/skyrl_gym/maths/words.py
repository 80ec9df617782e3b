r"""The words of an answer: names, units, and words that change a number.

math-verify reads letters as variables and drops ``\text{…}``, so it takes "seat" for "east", 3 km for 3 m, and a profit
for a loss. Words are therefore compared here:

- A ground truth of words alone, such as ``Tuesday`` or ``SSA``, is compared as it is written.
- A unit may be missing, as in 12 for 12 cm, but 12 m is not 12 cm.
- Words that change a number, as in 5 dozen, have to be in both.
- Quantities of several numbers, as in 3 h 20 min, have the same numbers and words in the same order.
"""

from __future__ import annotations

import re
import string


def _split(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|textsf|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_FIGURE = re.compile(r"\\(?:angle|triangle|overline|overrightarrow|overleftrightarrow)(?![A-Za-z])")
_SPACING = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}(?:\{[clr|]*\})?|\\[,;:!() ]|~|\\q?quad(?![A-Za-z])|(?<!\\)\$|[{}]")
_NAMES = re.compile(r"[A-Za-z][A-Za-z\s,;.'&-]*")
_DATE = re.compile(r"\d{4}([-/.])\d\d?\1\d\d?|\d\d?([-/.])\d\d?\2\d{4}")
_UNDIRECTED = re.compile(r"\s*\$?\s*\\(?:angle|overline)(?![A-Za-z])")
_VOWEL = frozenset("aeiou")
_SEPARATOR = re.compile(r"[,;&]|\band\b")
_POWER = re.compile(r"\}\s*\^\s*\{?([23])(?!\d)\}?")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,! ]|,\\!)(?=\d{3})")
_TOKEN = re.compile(
    r"(?P<number>\d(?:[\d,]*\d)?(?:\.\d+)?)|(?<![\\A-Za-z])(?P<word>[ap]\.\s?m\b\.?|[A-Za-z]+)(?:\s*\^\s*(?P<power>[23])(?!\d))?"
    r"|(?P<maths>\\(?:[A-Za-z]+|\$)|[^\s\w.,])"
)
_MATHS = _split(
    "pi log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh max min gcd lcm mod choose inf sup lim "
    "det dim ker alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi "
    "omega sqrt infinity infty hundred thousand million billion trillion percent pct percentage"
)
"""Words that `equivalence` or math-verify read."""
_CHANGES = _split(
    "factorial dozen pair score half halve third quarter fifth tenth hundredth thousandth ten double triple twice "
    "squared cubed negative minus below remainder reciprocal inverse opposite wrong incorrect gross lakh crore bn mn "
    "quadrillion quintillion ppm ppb permille basi bps"
)
"""Words that change the number beside them."""
_FILLERS = _split("and or to a an the is are of at than about approximately unit answer total")
_FORMS = {
    "hour": "h hr", "minute": "min", "second": "s sec", "year": "yr", "inch": "in inche", "foot": "ft feet",
    "yard": "yd", "mile": "mi", "pound": "lb", "ounce": "oz", "dollar": "usd", "square": "sq", "cubic": "cu",
    "degree": "deg", "celsius": "c celsiu", "fahrenheit": "f",
    "millimeter": "mm millimetre", "centimeter": "cm centimetre",
    "meter": "m metre", "kilometer": "km kilometre", "milligram": "mg", "gram": "g", "kilogram": "kg",
    "kilobyte": "kb", "megabyte": "mb", "gigabyte": "gb", "terabyte": "tb", "mole": "mol", "joule": "j", "watt": "w",
    "kilojoule": "kj", "kilowatt": "kw", "hertz": "hz", "pascal": "pa", "kilopascal": "kpa", "calorie": "cal",
    "volt": "v", "milliliter": "ml millilitre", "liter": "l litre", "people": "person",
    "child": "children", "radian": "rad",
}  # fmt: skip
_UNITS = {form: unit for unit, forms in _FORMS.items() for form in (unit, *forms.split())}
"""Forms of a unit without their plural s, and its name."""
_POWERS = {"2": "square", "3": "cubic"}
_CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_SPEED = re.compile(r"(?<![A-Za-z])([mk])ph(?![A-Za-z])")
_KNOWN = _CHANGES | _FORMS.keys() | {"am", "pm", "bc", "ad", "day", "per", "up"}


def compare_names(answer: str, gold: str) -> bool | None:
    r"""Compare an answer with a ground truth of words, or a date, as they are written; None if `gold` is neither.

    Two capital letters side by side and words of three letters are names. ``xy`` and ``mgh`` are products, and the
    names of functions and Greek letters are maths. Case, a plural s and the order of a list do not count, nor does the
    direction of ``\angle ABC`` and ``\overline{AB}``.
    """
    names = _strip_markup(gold)
    if _DATE.fullmatch(names):
        return _strip_markup(answer) == names
    words = re.findall("[A-Za-z]+", names)
    has_maths = any(word.lower() in _MATHS for word in words)
    if has_maths or not _NAMES.fullmatch(names) or not any(map(_is_name, words)):
        return None
    found = _list_names(_strip_markup(answer))
    is_undirected = all(_UNDIRECTED.match(text) for text in (answer, gold))
    return found == _list_names(names) or (is_undirected and found == _list_names(names[::-1]))


def _is_name(word: str) -> bool:
    if len(word) == 3 and word.islower():
        return (
            not _VOWEL.isdisjoint(word) and "".join(sorted(word)) not in string.ascii_lowercase
        )  # mgh and abc are products
    return len(word) > 2 or word[1:].isupper()


def have_same_words(answer: str, gold: str) -> bool:
    """Return False if the words around the numbers exclude that the answer is right."""
    tokens, expected_tokens = _tokens(answer), _tokens(gold)
    words, expected = ({text for kind, text in side if kind == "word"} - _FILLERS for side in (tokens, expected_tokens))
    if words & _CHANGES != expected & _CHANGES:
        return False
    if words and expected:
        areas_and_rates = {*_POWERS.values(), "per"}
        return words & areas_and_rates == expected & areas_and_rates and (words <= expected or expected <= words)
    bare = tokens if expected else expected_tokens  # 3 m beside 3 km: here the last letter is a unit, too
    return not bare or bare[-1][0] != "letter" or (words | expected).isdisjoint(_FORMS)


def compare_quantities(answer: str, gold: str) -> bool | None:
    """Compare an answer with quantities such as ``3 h 20 min``; None if `gold` has fewer than two numbers."""
    expected = _quantities(gold)
    return None if expected is None else _quantities(answer) == expected


def _quantities(text: str) -> list[tuple[str, str]] | None:
    """Return two or more numbers and the words between them; None if the text has anything else."""
    found = []
    for kind, word in _tokens(text):
        is_unit = kind == "letter" and _stem(word) in _FORMS
        found += [] if word in _FILLERS else [("word", _stem(word)) if is_unit else (kind, word)]
    kinds = [kind for kind, _ in found]
    return found if kinds.count("number") > 1 and set(kinds) == {"number", "word"} else None


def unwrap_numbers(text: str) -> str:
    r"""Return the text with ``\text{73 apples}`` as ``73 apples``."""
    return _WRAPPED.sub(lambda part: f" {part[1]} " if re.search(r"\d", part[1]) else part[0], text)


def _tokens(text: str) -> list[tuple[str, str]]:
    r"""Return numbers, words, single letters and parts of formulas, each with its kind.

    All of ``\text{…}`` is words. Elsewhere, letters side by side may be variables, so only known words and those of
    four letters count.
    """
    tokens: list[tuple[str, str]] = []
    text = _THOUSANDS.sub(",", text)
    text = _SPEED.sub(lambda unit: {"m": "mile", "k": "km"}[unit[1]] + " per hour", _POWER.sub(r"^\1}", text))
    if text.count("$") % 2 and "\\$" not in text:  # no pair of delimiters
        text = text.replace("$", "\\$")
    for index, part in enumerate(_WRAPPED.split(text)):
        for match in _TOKEN.finditer(_SPACING.sub(" ", part)):
            word = _stem(match["word"] or "")
            if match["number"]:
                tokens.append(("number", match[0].replace(",", "")))
            elif match[0] == "/" and tokens and tokens[-1][0] == "word":
                tokens.append(("word", "per"))
            elif match[0] in _CURRENCIES:
                tokens.append(("word", _CURRENCIES[match[0]]))
            elif not word or word in _MATHS:
                tokens.append(("maths", match[0]))
            elif len(word) == 1 and (index % 2 == 0 or word in "eid"):  # \mathrm{e} is Euler's number
                tokens.append(("letter", word))
            elif index % 2 == 1 or len(word) > 3 or word in _KNOWN:
                tokens += [("word", word), *([("word", _POWERS[match["power"]])] if match["power"] else [])]
            else:
                tokens.append(("maths", word))
    return tokens


def _stem(word: str) -> str:
    """Return a word in lower case, without dots and plural s, and a unit by its name."""
    word = re.sub(r"[.\s]", "", word.lower())
    word = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    return _UNITS.get(word, word)


def _strip_markup(text: str) -> str:
    text = _WRAPPED.sub(r" \1 ", _FIGURE.sub(" ", text))
    return " ".join(_SPACING.sub(" ", text).split()).strip(" .()")


def _list_names(text: str) -> list[list[str]]:
    return sorted(
        [_stem(word) for word in re.findall(r"[^\s.']+", part)] for part in _SEPARATOR.split(text) if part.strip()
    )
