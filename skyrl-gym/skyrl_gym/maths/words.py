r"""The words of an answer: names, units, and words that change a number.

math-verify reads letters as variables and drops ``\text{…}``, so it takes "seat" for "east", 3 km for 3 m, and a profit
for a loss. Words are therefore compared here:

- A ground truth of words alone, such as ``Tuesday`` or ``SSA``, is compared word for word.
- A unit may be missing, as in 12 for 12 cm, but 12 m is not 12 cm.
- Words that change a number, as in 5 dozen, must be in both. Opposites such as profit and loss differ. Other words are
  labels: 10 ways are 10 arrangements.
- Quantities of several numbers, such as 3 h 20 min, must have the same numbers and words in the same order.
- A ground truth that is the letter of a choice, such as ``C``, is compared with the answer's letter: ``(C) 42`` counts.
"""

import re
import string
from fractions import Fraction


def _split(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|textsf|mathrm|mathbf|mathit|mathsf|emph|mbox)\s*\{([^{}]*)\}")
_FIGURE = re.compile(r"\\(?:angle|triangle|overline|overrightarrow|overleftrightarrow)(?![A-Za-z])")
_SPACING = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}(?:\{[clr|]*\})?|\\[,;:!() ]|~|\\q?quad(?![A-Za-z])|(?<!\\)\$|[{}]")
_NAMES = re.compile(r"[A-Za-z][A-Za-z\s,;.'&-]*")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{4}")
_TIME = re.compile(r"\d{1,2}:\d\d\s*(?:(?P<half>[ap])\.?\s?m\.?)?", re.IGNORECASE)
_LETTERS = re.compile(r"[A-Z](?:(?:\s*,\s*|\s+and\s+)[A-Z])+")
_CHOICE = re.compile(r"(?:(?i:option|choice)\s+)?(?:\(([A-J])\)(?=\s|\\|$)|([A-J])(?:[.):](?=\s|\\|$)|$))(.*)", re.S)
"""The letter of a choice, and its text."""
_OTHER_CHOICE = re.compile(r"(?:^|[\s(])[A-J][.):](?:\s|$)|\b(?:or|and|not)\b")
_CHOICES = re.compile(r"[A-J]{2,}|[A-J](?:(?:\s*,\s*|\s+and\s+)[A-J])+")
SYMBOLS_OF_UNITS = (
    "m km cm mm nm ft in yd mi miles? ms s sec min h hr hours? days? years? kg mg g lbs? oz mL ml L l kN N kJ J kW W "
    "kPa Pa kHz Hz K mol rad V A dollars? cents? units? persons? people"
)
COMPOUND_UNIT = rf"(?:{SYMBOLS_OF_UNITS.replace(' ', '|')})(?![A-Za-z])(?:\s*\^\s*\{{?-?\d\}}?)?"
_UNIT_OF_LETTERS = re.compile(rf"(?<=\d)\s+((?=[^/^]*[/^]){COMPOUND_UNIT}(?:\s*/\s*{COMPOUND_UNIT})*)\.?\s*$")
"""A unit with ``/`` or ``^`` outside of ``\\text{…}``, where a lone letter would be a variable."""
_INVERSE = re.compile(rf"(?<![A-Za-z])({SYMBOLS_OF_UNITS.replace(' ', '|')})\s*\^\s*\{{?\s*-\s*([123])\s*\}}?")
_UNIT_LETTER = re.compile(r"(.*\d)(?:\s|\\[,; ]|~)*([mshgLlNJWKVA])", re.S)
_UNDIRECTED = re.compile(r"\s*\$?\s*\\(?:angle|overline)(?![A-Za-z])")
_VOWELS = frozenset("aeiou")
_SEPARATOR = re.compile(r"[,;&]|\band\b")
_POWER = re.compile(r"\}\s*\^\s*\{?([23])(?!\d)\}?")
_RAISED = str.maketrans({"²": "^2", "³": "^3"})
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,! ]|,\\!)(?=\d{3})")
_TOKEN = re.compile(
    r"(?P<number>\d+(?:,\d{3}(?!\d))*(?:\.\d+)?)|(?<![\\A-Za-z])(?P<word>[ap]\.\s?m\b\.?|[A-Za-z]+)(?:\s*\^\s*(?P<power>[23])(?!\d))?"
    r"|(?P<maths>\\(?:[A-Za-z]+|\$)|[^\s\w.,])"
)
_MATHS = _split(
    "pi log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh max min gcd lcm mod choose inf sup lim "
    "det dim ker alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi "
    "omega sqrt infinity infty hundred thousand million billion trillion percent pct percentage"
)
"""Words that `equivalence` or math-verify understand."""
_CHANGES = _split(
    "factorial dozen gross squared cubed half tenth hundredth thousandth negative minus below lakh crore bn mn "
    "quadrillion quintillion ppm ppb permille basi bps reciprocal wrong incorrect"
)
"""Words that change the number next to them."""
_OPPOSED = _split(
    "more less most least greater smaller profit loss gain increase decrease north south east west left right up down "
    "even odd clockwise counterclockwise anticlockwise am pm bc ad before after above inside outside january february "
    "march april may june july august september october november december"
)
"""Words that exclude each other. All other words are labels and need not agree: 10 ways are 10 arrangements."""
_CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_ARTICLES = _split("a an the")
# Unit names with their other forms, without a plural s. 3 km and 3 kilometres agree, 3 km and 3 m do not.
_FORMS = {
    "hour": "h hr", "minute": "min", "second": "s sec", "year": "yr", "inch": "in inche", "foot": "ft feet",
    "yard": "yd", "mile": "mi", "pound": "lb", "ounce": "oz", "cent": "", "dollar": "usd buck",
    "euro": "eur", "yen": "jpy", "rupee": "inr", "square": "sq", "cubic": "cu",
    "degree": "deg", "celsius": "c celsiu", "fahrenheit": "f",
    "millimeter": "mm millimetre", "centimeter": "cm centimetre",
    "meter": "m metre", "kilometer": "km kilometre", "milligram": "mg", "gram": "g", "kilogram": "kg",
    "kilobyte": "kb", "megabyte": "mb", "gigabyte": "gb", "terabyte": "tb", "mole": "mol", "joule": "j", "watt": "w",
    "kilojoule": "kj", "kilowatt": "kw", "hertz": "hz", "pascal": "pa", "kilopascal": "kpa", "calorie": "cal",
    "volt": "v", "milliliter": "ml millilitre", "liter": "l litre", "people": "person", "gallon": "gal", "week": "wk",
    "newton": "n", "kelvin": "k", "tablespoon": "tbsp", "teaspoon": "tsp", "month": "mo", "quart": "qt", "day": "day",
    "child": "children", "radian": "rad",
}  # fmt: skip
_UNITS = {form: unit for unit, forms in _FORMS.items() for form in (unit, *forms.split())}
"""Unit names by form."""
_POWERS = {"2": "square", "3": "cubic"}
_TEMPERATURE = re.compile(r"(?:°|\^\s*\{?\s*\\circ\s*\}?)\s*([CF])(?![A-Za-z])")
_SPEED = re.compile(r"(?<![A-Za-z])([mk])ph(?![A-Za-z])")
_KNOWN = _CHANGES | _OPPOSED | _FORMS.keys() | {"per"}


def compare_names(answer: str, gold: str) -> bool | None:
    r"""Compare an answer with a ground truth that consists of words or is a date. Return None if `gold` is neither.

    Words of three letters and lists of capital letters are names. ``xy``, ``AB`` and ``mgh`` are products, and the
    names of functions and Greek letters are maths. Case, a plural s, the order of a list and the direction of ``\angle
    ABC`` and ``\overline{AB}`` are ignored.
    """
    names, given = _strip_markup(gold), _strip_markup(answer)
    if _DATE.fullmatch(names):
        return _numbers(given) == _numbers(names)
    times = [_TIME.fullmatch(text) for text in (names, given)]
    if times[0] and any(time and time["half"] for time in times):
        halves = {time["half"].lower() for time in times if time and time["half"]}
        return times[1] is not None and len(halves) == 1 and _numbers(given) == _numbers(names)
    words = re.findall("[A-Za-z]+", names)
    has_maths = any(word.lower() in _MATHS for word in words)
    has_letters = _UNDIRECTED.match(gold) is not None or _LETTERS.fullmatch(names) is not None
    if has_maths or not _NAMES.fullmatch(names) or not (has_letters or any(map(_is_name, words))):
        return None
    is_undirected = all(_UNDIRECTED.match(text) for text in (answer, gold))
    return _list_names(given) in (_list_names(names), _list_names(names[::-1]) if is_undirected else None)


def compare_choices(answer: str, gold: str) -> bool | None:
    """Compare the letters of choices. Return None if `gold` is not a choice, or the answer has no letter or several.

    ``C`` is ``(C) 42`` and ``Option C``, and ``ABD`` is ``A, B, D``.
    """
    sides = [_WRAPPED.sub(r"\1 ", text.replace("**", "").replace("$", "")).strip(" .") for text in (gold, answer)]
    lists = [sorted(re.findall("[A-J]", text)) for text in sides if _CHOICES.fullmatch(text)]
    if len(lists) == 2 and sides[0].isalpha() != sides[1].isalpha():
        return lists[0] == lists[1]
    choices = [_CHOICE.fullmatch(text) for text in sides]
    if choices[0] is None or choices[1] is None or _OTHER_CHOICE.search(choices[1][3]):
        return None
    gold_letter, letter = (choice[1] or choice[2] for choice in choices if choice)
    return bool(gold_letter == letter)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _is_name(word: str) -> bool:
    """Return True for SSA, Tuesday and red, False for products such as AB, mgh, abc and nRT.

    A product has no vowel, is a run of the alphabet, or mixes upper and lower case.
    """
    if word.islower():
        is_product = _VOWELS.isdisjoint(word) or "".join(sorted(word)) in string.ascii_lowercase
        return len(word) > 2 and not is_product
    return len(word) > 2 and (word.isupper() or word.istitle())


def have_same_words(answer: str, gold: str) -> bool:
    """Return False if the words around the numbers show that the answer is wrong.

    Most words are labels and may differ: "10 ways" may be "10 arrangements". Only three kinds of words count. Words
    that change a number must be on both sides: "5 dozen" is not "5". Units may be missing on one side, but must not
    differ: "12" is "12 km", but "12 m" is not. If both sides have words with opposites, these must match: "profit of 5"
    is not "loss of 5".
    """
    sides = [_tokens(text.rpartition("=")[2] if text.count("=") == 1 else text) for text in (answer, gold)]
    words, expected = ({text for kind, text in side if kind == "word"} for side in sides)
    if words & _CHANGES != expected & _CHANGES:
        return False
    units, expected_units = words & _FORMS.keys(), expected & _FORMS.keys()
    if units and expected_units:
        rates = {*_POWERS.values(), "per"} if units.isdisjoint(_CURRENCIES.values()) else set()
        if words & rates != expected & rates or not (units <= expected_units or expected_units <= units):
            return False
    elif units or expected_units:
        # A lone letter is usually a variable. If the other side has a unit, it is a unit too: 3 m is not 3 km.
        first_of_kind = dict(reversed(sides[0] if expected_units else sides[1]))
        letter = _stem(first_of_kind.get("letter", ""))
        if (
            letter
            and "number" in first_of_kind
            and (letter not in units | expected_units or (words | expected) & {*_POWERS.values(), "per"})
        ):
            return False
    opposed, expected_opposed = words & _OPPOSED, expected & _OPPOSED
    return not opposed or not expected_opposed or opposed == expected_opposed


def strip_unit_letter(text: str, other: str) -> str:
    """Remove the letter after a number if `other` names that unit: ``5 N`` becomes ``5`` next to ``5 newtons``."""
    found = _UNIT_LETTER.fullmatch(text.strip(" $."))
    return found[1] if found and ("word", _stem(found[2])) in _tokens(other) else text


def compare_quantities(answer: str, gold: str) -> bool | None:
    """Compare an answer with quantities such as ``3 h 20 min``. Return None if `gold` has fewer than two numbers."""
    expected = _quantities(gold)
    return None if expected is None else _quantities(answer) == expected


def _quantities(text: str) -> list[tuple[str, object]] | None:
    """Return two or more numbers and the words between them, or None if the text has anything else."""
    found: list[tuple[str, object]] = []
    for kind, word in _tokens(text):
        if kind == "number":
            found.append((kind, Fraction(word)))
        elif word != "and":
            found.append(("word", _stem(word)) if kind == "letter" and _stem(word) in _FORMS else (kind, word))
    kinds = [kind for kind, _ in found]
    return found if kinds.count("number") > 1 and set(kinds) == {"number", "word"} else None


def unwrap_numbers(text: str) -> str:
    r"""Rewrite ``\text{73 apples}`` as ``73 apples``."""
    return _WRAPPED.sub(lambda part: f" {part[1]} " if re.match(r"[\s$\\+-]*\d", part[1]) else part[0], text)


def _tokens(text: str) -> list[tuple[str, str]]:
    r"""Return numbers, words, single letters and parts of formulas, each with its kind.

    Everything in ``\text{…}`` is words. Elsewhere, adjacent letters may be variables, so only known words and words of
    four letters count.
    """
    tokens: list[tuple[str, str]] = []
    text = _INVERSE.sub(lambda unit: f"/{unit[1]}^{unit[2]}".removesuffix("^1"), text.translate(_RAISED))
    text = _TEMPERATURE.sub(r"\\text{ \1}", _UNIT_OF_LETTERS.sub(r"\\text{\1}", text))
    text = _UNIT_FRACTION.sub(r"\\text{\1/\2}", _THOUSANDS.sub(",", text))
    text = _SPEED.sub(lambda unit: {"m": "mile", "k": "km"}[unit[1]] + " per hour", _POWER.sub(r"^\1}", text))
    if text.count("$") % 2 and "\\$" not in text:  # an unpaired delimiter
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
            elif len(match["word"]) == 1 and (index % 2 == 0 or word in "eid"):  # \mathrm{e} is Euler's number
                tokens.append(("letter", match["word"]))
            elif index % 2 == 1 or len(word) > 3 or word in _KNOWN:
                tokens += [("word", word), *([("word", _POWERS[match["power"]])] if match["power"] else [])]
            else:
                tokens.append(("maths", word))
    return tokens


def _stem(word: str) -> str:
    """Return a word in lower case without dots and plural s, or the name of a unit."""
    word = re.sub(r"[.\s]", "", word.lower())
    singular = re.sub(r"(?<=ss|ch|sh)es$|(?<=x)es$|(?<=[a-z])(?<!s)s$", "", word)
    if unit := _UNITS.get(word, _UNITS.get(singular)):
        return unit
    return singular if len(word) > 3 else word


def _strip_markup(text: str) -> str:
    text = _WRAPPED.sub(r" \1 ", _FIGURE.sub(" ", text.replace("**", "")))
    return " ".join(_SPACING.sub(" ", text).split()).strip(" .()")


def _list_names(text: str) -> list[list[str]]:
    return sorted(
        [_stem(word) for word in re.findall(r"[^\s.']+", part) if word.lower() not in _ARTICLES]
        for part in _SEPARATOR.split(text)
        if part.strip()
    )
