r"""Equivalence of an answer and the ground truth, based on math-verify.

math-verify decides whether two expressions are equal. An answer must also be a single result:

- It has no operation left that the ground truth lacks: ``137\cdot248`` and ``\binom{20}{10}`` restate a question.
- The numbers in a chain of equations agree: ``41 = 42`` and ``42 \approx 41`` are no answer.
- Notation that changes a number counts: ``42\%`` is 0.42, ``42_{43}`` has another base, ``42 thousand`` is 42000.
- Words count: see `words`.
- Numbers are equal relative to their size: ``6.63e-34`` is not ``1.05e-34``. Exact numbers are compared exactly, and
  decimals with six digits.

Only the workers of `skyrl_gym.maths` import this module, because sympy is slow to import.
"""

import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import (
    Basic,
    Derivative,
    Expr,
    FiniteSet,
    Float,
    Function,
    Integer,
    Integral,
    Intersection,
    Limit,
    MatrixBase,
    MatrixExpr,
    Max,
    Min,
    Mod,
    Product,
    Rational,
    Sum,
    Symbol,
    UnevaluatedExpr,
    Union,
    exp,
    preorder_traversal,
)
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

from skyrl_gym.maths.words import (
    COMPOUND_UNIT,
    compare_choices,
    compare_names,
    compare_quantities,
    have_same_words,
    strip_unit_letter,
    unwrap_numbers,
)

BOX = [LatexExtractionConfig(boxed_match_priority=0)]
APPROXIMATION = 0.005  # maximum relative difference between the sides of an approximation
MAX_ROOT_DIGITS = 40  # digits of a number whose roots are computed
EXACT_DIGITS = 100  # digits computed to compare exact numbers

_NAMES = ("times", "cdot", "cdot", "approx", "equiv", "leq", "geq", "neq", "infty", "pm", "cap", "cup", "mu")
_GREEK = ("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "pi", "rho", "sigma", "tau", "phi", "omega")
_COMMANDS = {
    symbol: rf"\{name} " for symbol, name in zip("×·⋅≈≡≤≥≠∞±∩∪\u00b5αβγδθλμπρστφω", (*_NAMES, *_GREEK), strict=True)
}
_FRACTIONS = {
    symbol: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", symbol).split("⁄"))
    for symbol in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}
_SYMBOLS = str.maketrans("−–÷⁄∕~", "--/// ", "€£") | str.maketrans(
    _COMMANDS | _FRACTIONS | {"°": r"^\circ ", "∛": "√[3]", "∜": "√[4]"}
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙᵢₓ"
_SCRIPT = re.compile(f"([{_RAISED}]+)|[{_LOWERED}]+")
_UNSCRIPTED = str.maketrans(_RAISED + _LOWERED, "0123456789+-ni0123456789+-nix")
_UPRIGHT = (
    r"\\(?:mathrm|textrm|text|operatorname)\s*\{\s*([ei])\s*\}"
    r"|\{\\rm\s+([ei])\s*\}|\\(?:mathrm|rm)\s+([ei])(?![A-Za-z])"
)
_TEXT = r"\s*\\(?:text|mathrm)\s*\{[^{}]*\}\s*"
_NAMES_OF_FUNCTIONS = "pi|log|ln|exp|sin|cos|tan|csc|cot|sinh|cosh|tanh|arcsin|arccos|arctan"
_SECANT = re.compile(r"(?<![\\A-Za-z])sec(?=\()")  # without the parenthesis, it may be a unit
_NOTATION = (
    (re.compile(r"√(\[\d\])?\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+))", re.ASCII), r"\\sqrt\1{\2\3}"),
    (re.compile(r"√", re.ASCII), r"\\sqrt"),
    (re.compile(rf"(?<=[A-Za-z])(?={_UPRIGHT})", re.ASCII), " "),
    (re.compile(_UPRIGHT, re.ASCII), r"\1\2\3"),  # Euler's number or the imaginary unit
    (re.compile(r"\*\*", re.ASCII), "^"),  # this line and the next: 10**-3 and 10^-3
    (re.compile(r"\^\s*([-+]\s*(?:\d+|[A-Za-z]))", re.ASCII), r"^{\1}"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", re.ASCII), r"\\times "),
    (re.compile(r"(?<![\\A-Za-z])log(2|10)(?=\()"), r"\\log_{\1}"),
    (re.compile(r"(?<![A-Za-z])\\?lg(?![A-Za-z])"), r"\\log_{10} "),
    (re.compile(rf"\\(?:mathrm|operatorname|text)\s*\{{\s*\\?({_NAMES_OF_FUNCTIONS})\s*\}}", re.ASCII), r"\\\1 "),
    (re.compile(rf"(?<![\\A-Za-z])({_NAMES_OF_FUNCTIONS})(?![A-Za-z])", re.ASCII), r"\\\1 "),
    (re.compile(r"\\[dtc]?frac(?:\s+(\d)|\s*(\\pi))\s*(\d)", re.ASCII), r"\\frac{\1\2}{\3}"),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"^\s*\|([A-Za-z])\|\s*(<|\\leq?(?![A-Za-z]))\s*(\d+(?:\.\d+)?)\s*$", re.ASCII), r"-\3 \2 \1 \2 \3"),
    (re.compile(r"\((\d+)\)(?=\s*_)", re.ASCII), r"\1"),
    (re.compile(r"\b([ap])\.\s?m\b\.?", re.ASCII | re.IGNORECASE), r"\1m"),
    (re.compile(r"(?<![\\A-Za-z])infinity(?![A-Za-z])", re.ASCII | re.IGNORECASE), r"\\infty "),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), r"\\text{ or }"),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), r"\\text{ and }"),
    (re.compile(rf"(?<=[\d}}])[\s\\,;]*\\[dt]?frac\{{{_TEXT}\}}\{{{_TEXT}\}}$"), ""),  # a unit
    (re.compile(r",\s*(?:\\[lc]?dots[cbm]?(?![A-Za-z])|\.\.\.|…)", re.ASCII), r",\\ldots"),
)
"""Notation that math-verify does not read, and its LaTeX."""
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?)(\d+)(?![\w.])", re.ASCII)
_MATHS_DELIMITER = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|\\[,! ]|,\\!| )\d{3})+(?!\d)", re.ASCII)
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent|pct)\s*\}|\b(?:percent(?:age)?|pct)\b)\.?\s*$", re.I)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\s*(?:\\text\s*\{{\s*)?\b({'|'.join(_SCALES)})\b(?:\s*\}})?", re.IGNORECASE)
_NUMBER = r"[-+]?(?:\\\$|\d)[\d.,]*(?:\s*/\s*\d+|\s+\d+/\d+)?|[-+]?\d*\\[dt]?frac\{\d+\}\{\d+\}"
_UNIT = re.compile(
    rf"((?:{_NUMBER})(?:\s*\\times\s*10\^\{{?-?\d+\}}?)?)((?:\s+[A-Za-z]{{2,}}){{1,4}}"
    rf"|(?=[^/^]*[/^])\s+{COMPOUND_UNIT}(?:(?:\s*/\s*|\s*\\cdot\s+|\s+){COMPOUND_UNIT})*)\.?",
    re.ASCII,
)
"""A number and its unit: words, or symbols with ``/`` or ``^``. All other letters are variables, as in ``12 x/y``."""
_TEMPERATURE = re.compile(r"(\^\s*\{?\s*\\circ\s*\}?)\s*[CF]\s*$")
_NO_UNIT = re.compile(
    r"\b(?:or|and|to|not|mod|modulo|times|plus|minus|over|point|half|halves|thirds?|quarters?|dozens?|squared|cubed"
    r"|factorial|choose|base|than|more|less|pi|tau|phi|rho|mu|nu|xi|alpha|beta|gamma|delta|theta|lambda|sigma|omega"
    r"|sqrt|sin|cos|tan|log|ln|exp)\b",
    re.IGNORECASE,
)
_MIXED = re.compile(r"(?<![\d.,/])(\d+) +(\d+)/(\d+)", re.ASCII)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", re.ASCII)
_DECIMAL_BASE = re.compile(r"(?<=[\d}])_(?:\{10\}|10\b)")
_BASE = re.compile(r"[\d})]\s*_(?:\{\s*(\d+)\s*\}|(\d))?")
_JUXTAPOSED = re.compile(r"\d\s+\d+(?!\d*\s*/)|[\d)]\s*\(\s*-?[\d.]+\s*\)", re.ASCII)
"""Numbers side by side. math-verify would add them up."""
_OPERATION = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|bmod|pmod|mod|[dt]?binom|choose|gcd|lcm|max|min|sup|inf)(?![A-Za-z])"
    r"|(?<![A-Za-z])(?:mod|choose|gcd|lcm)(?![A-Za-z])"
)
_MODULUS = re.compile(r"\(?\s*\\?[pb]?mod\b.*$", re.DOTALL)
_NAMED = re.compile(r"^\s*\$?\s*[A-Za-z](?:_\w|\(\w\))?\s*=(?=(?:[^A-Za-z\\=]|\\[A-Za-z]+)*$)")
"""The name of a number, as in ``x = 42``."""
_SHORTENED = re.compile(r"(?<![A-Za-z])(sq|cu)\.", re.IGNORECASE)
_NEGATIVE = re.compile(
    r"(?<![\w)}])(?<![\w)}] )(?:\\text\s*\{\s*(?:negative|minus)\s*\}\s*|(?:negative|minus)\s+)(?=[\d\\.])",
    re.IGNORECASE,
)
"""The word for a sign; between two numbers, ``minus`` is a subtraction."""
_COORDINATE = re.compile(r"\s*\$?\s*([xyz])\s*=(?=[^xyz=]*$)")
_RELATION = re.compile(r"(\\approx|\\simeq|\\equiv|=)(?![A-Za-z])")
_UNSPLIT = re.compile(
    r"[<>!:]\s*=|[<>]|\\(?:n?leq?|n?geq?|ne|neq|lt|gt|lor|land|cup|cap|pm|mp|in)(?![A-Za-z])|\\not|\bor\b|\band\b|[;&]"
)
_OR, _AND = re.compile(r"\bor\b"), re.compile(r"\band\b")
_BLANK = re.compile(r"(?<![\w\s])\s+|\s+(?![\w\s])|(?<=\s)\s+")
r"""White space that separates no words or numbers, as in ``A \cap B``."""
_LIST_COMMA = re.compile(r",(?!\d{3}(?!\d))|\n")


def is_same(answer: str, gold: str) -> bool | None:
    """Return True if `answer` is a result equal to `gold`, or None if math-verify cannot parse `gold`.

    math-verify reads letters as variables and drops text, so several comparisons come before it, and each may decide
    alone:

    1. Choices: "(C) 42" is "C".
    2. Names: "Tuesdays" is "Tuesday". math-verify would read a product of variables.
    3. Quantities: "3h 20min" is "3 h 20 min".
    4. Words: "12 m" is not "12 km", and "profit of 5" is not "loss of 5".
    5. math-verify, once per reading: "2e-3" is 0.002 and also 2e - 3. One equal reading is enough.
    """
    coordinates = [name[1] for name in map(_COORDINATE.match, (answer, gold)) if name is not None]
    if len(set(coordinates)) > 1:
        return False  # x = 5 and y = 5 are different lines
    answer, gold = (_SECANT.sub(r"\\sec", text) for text in (answer, gold))
    answer, gold = (_NEGATIVE.sub("-", _SHORTENED.sub(r"\1", text)) for text in (answer, gold))
    for compare in (compare_choices, compare_names, compare_quantities):
        if (verdict := compare(answer, gold)) is not None:
            return verdict
    if not have_same_words(answer, gold):
        return False
    answer, gold = strip_unit_letter(answer, gold), strip_unit_letter(gold, answer)
    answer, gold = unwrap_numbers(answer), unwrap_numbers(gold)
    verdicts = [_compare(text, truth) for truth in _readings(gold) for text in _readings(answer)]
    return None if None in verdicts else any(verdicts)


def _readings(text: str) -> list[str]:
    """Write numbers such as ``1.5e3`` as powers of ten. ``2e-3`` also has the reading 2e - 3, with Euler's number."""
    scientific = _SCIENTIFIC.sub(r"\1 \\times 10^{\2\3}", text)
    is_ambiguous = any("." not in number[1] and number[2] for number in _SCIENTIFIC.finditer(text))
    return [scientific, text] if is_ambiguous else [scientific]


def _compare(answer: str, gold: str) -> bool | None:
    gold, gold_is_percent = _normalize(_NAMED.sub("", gold))
    parsed_gold = _parse(gold, is_percent=gold_is_percent)
    if not parsed_gold:
        return None
    answer, is_percent = _normalize(answer)
    if is_percent == gold_is_percent and _BLANK.sub("", answer) == _BLANK.sub("", gold):
        return True  # math-verify compares what it cannot compute as text, such as A \cup B
    sides, is_approximate = ([answer], False) if _RELATION.search(gold) else _split(answer)
    if is_approximate and not _are_close([_parse(side) for side in sides]):
        return False
    candidates = []
    for side in sides:
        if any(pattern.search(side) and not pattern.search(gold) for pattern in (_OPERATION, _BASE, _JUXTAPOSED)):
            continue
        if _BASE.search(side) and _bases(side) != _bases(gold):
            continue
        if is_percent and not gold_is_percent:
            side = rf"\frac{{{side}}}{{100}}"
        parsed = _parse(side, is_percent=is_percent and gold_is_percent)
        if parsed and _operations(parsed, parsed_gold) <= _operations(parsed_gold, parsed_gold):
            candidates.append(_with_variants(parsed, side))
    truths = _with_variants(parsed_gold, gold)
    return any(verify(truths, parsed, timeout_seconds=None, allow_set_relation_comp=True) for parsed in candidates)


def _bases(text: str) -> list[str]:
    return [braced or digit for braced, digit in _BASE.findall(text)]


def _with_variants(parsed: list[Any], text: str) -> list[Any]:
    r"""Add forms of a parsed text that are equal to it but that math-verify would call different.

    math-verify declares the symbols of ``2 i`` complex and the symbol of ``2i`` real, so the two would differ.
    Inequalities such as ``x < 2 \text{ or } x > 5`` become the union, or the intersection, of their solutions.
    """
    first = parsed[0]
    if isinstance(first, Expr) and any(not symbol.is_real for symbol in first.free_symbols):
        return [*parsed, first.xreplace({symbol: Symbol(symbol.name, real=True) for symbol in first.free_symbols})]
    combine = Union if _OR.search(text) else Intersection if _AND.search(text) else None
    relations = first.args if isinstance(first, FiniteSet) and combine is not None else ()
    if combine is not None and relations and all(map(grader.is_relation, relations)):
        with suppress(NotImplementedError):  # sympy cannot solve them
            return [*parsed, combine(*(relation.as_set() for relation in relations))]
    return parsed


def _is_equal_number(gold: Any, answer: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compare two expressions as math-verify does, but also relative to their size: its tolerances are absolute.

    Exact numbers must agree in nearly `EXACT_DIGITS` digits. If they do not, `grader` simplifies them. Decimals must
    agree in six digits. They may also be rounded to six decimal places if three digits remain, as 0.083333 for 1/12.
    """
    expressions = (gold, answer)
    if any(isinstance(part, Expr) and part.is_number and part.has(Float) for part in expressions):
        gold, answer = map(grader.safe_sympy_doit, expressions)  # 3.33333 * 10**-1 is a decimal too
    if not _is_equal_absolutely(gold, answer, float_rounding, numeric_precision):
        return False
    is_matrix = isinstance(gold, MatrixBase | MatrixExpr)  # math-verify compared its elements with this function
    if is_matrix or grader.get_pct_val(gold, gold) == grader.get_pct_val(answer, answer):
        return True
    gold, answer = map(grader.safe_sympy_doit, (gold, answer))
    is_exact = not (gold.has(Float) or answer.has(Float))
    tolerance = Float(10, EXACT_DIGITS) ** (20 - EXACT_DIGITS) if is_exact else 2e-6
    sizes = gold.evalf(EXACT_DIGITS).as_coefficients_dict()
    differences = (gold - answer).evalf(EXACT_DIGITS).as_coefficients_dict()
    if all(abs(difference) <= tolerance * abs(sizes[term]) for term, difference in differences.items()):
        return True
    decimals = [Decimal(str(number)) for number in (gold, answer) if isinstance(number, Float)]
    return any(round(decimal, 6) == decimal and abs(decimal) >= Decimal("1e-4") for decimal in decimals)


_is_equal_absolutely = grader.sympy_numeric_eq
grader.sympy_numeric_eq = _is_equal_number  # the only place where math-verify compares numbers with a tolerance


def _parse(text: str, *, is_percent: bool = False) -> list[Any]:
    text = rf"${text}$\%" if is_percent else rf"\boxed{{{text}}}"
    parsed: list[Any] = parse(text, BOX, parsing_timeout=None)
    return parsed


def _normalize(text: str) -> tuple[str, bool]:
    """Rewrite a number's notation so that math-verify reads it.

    Return the text without a percent sign, and True if it had one.
    """
    text = _MATHS_DELIMITER.sub(" ", text.translate(_SYMBOLS)).strip().rstrip(" .,;")
    text = _SCRIPT.sub(lambda script: f"{'^' if script[1] else '_'}{{{script[0].translate(_UNSCRIPTED)}}}", text)
    for pattern, template in _NOTATION:
        text = pattern.sub(template, text)
    text = _TEMPERATURE.sub(r"\1", text)
    text = _THOUSANDS.sub(lambda number: "".join(re.findall(r"\d", number[0])), text)
    percent = _PERCENT.search(text)
    text = text[: percent.start()] if percent else text
    unit = _UNIT.fullmatch(_SCALE.sub("", text))
    if unit is not None and not _NO_UNIT.search(unit[2]):
        text = text[: text.rindex(unit[2])] if unit[2] in text else text
    text = _SCALE.sub(lambda word: rf" \times 10^{{{_SCALES[word[1].lower()]}}}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _REPEATING.sub(_format_fraction, _DECIMAL_BASE.sub("", text))
    return text, percent is not None


def _format_fraction(decimal: re.Match[str]) -> str:
    """Format a repeating decimal, e.g. ``0.1\\overline{6}``, as a fraction."""
    sign, whole, fixed, repeated = decimal.groups()
    scale = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    value = Fraction(int(f"0{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}"), scale)
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def _split(text: str) -> tuple[list[str], bool]:
    r"""Return the sides of an equation that may be the result, and True if it is an approximation.

    An exact chain ends with its result: ``x = 6 \cdot 7 = 42`` gives ``42``. An approximation may have the result on
    either side of the last ``\approx``: ``\frac{1}{3} \approx 0.333`` gives both sides. If the numbers differ, as in
    ``41 = 42``, no side is the result.
    """
    if _UNSPLIT.search(text) or _LIST_COMMA.search(text):
        return [text], False
    sides, relations, depth, start = [], [], 0, 0
    for token in re.finditer(rf"[{{}}()]|{_RELATION.pattern}", text):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(token[0], 0)
        if depth == 0 and token[1]:
            sides.append(text[start : token.start()])
            relations.append(token[1])
            start = token.end()
    sides = [side for side in map(str.strip, [*sides, text[start:]]) if side]
    if r"\equiv" in relations and sides:
        sides[-1] = _MODULUS.sub("", sides[-1])
    is_approximate = not {r"\approx", r"\simeq"}.isdisjoint(relations)
    numbers = [float(side) for side in sides if re.fullmatch(r"-?\d+(?:\.\d+)?", side, re.ASCII)]
    tolerance = APPROXIMATION if is_approximate else 0.0
    if numbers and max(numbers) - min(numbers) > tolerance * abs(numbers[0]):
        return [], is_approximate
    return sides[-2 if is_approximate else -1 :], is_approximate


def _are_close(sides: Sequence[list[Any]]) -> bool:
    """Return True if all sides that are numbers are approximately equal."""
    numbers = [parsed[0].evalf(15) for parsed in sides if parsed and isinstance(parsed[0], Expr)]
    values = [float(number) for number in numbers if isinstance(number, Float)]
    return all(abs(value - values[0]) <= APPROXIMATION * abs(values[0]) for value in values)


def _operations(parsed: Sequence[Any], gold: Sequence[Any]) -> set[str]:
    """Return the kinds of operations that are left to carry out.

    In an answer with variables only sums, limits and the like count: ``(x+1)^2`` is as good as ``x^2+2x+1``.
    """
    is_symbolic = isinstance(gold[0], Basic) and bool(gold[0].free_symbols)
    found = set()
    for node in preorder_traversal(parsed[0]) if isinstance(parsed[0], Basic) else ():
        if isinstance(node, Sum | Product | Integral | Limit | Derivative | Mod | UnevaluatedExpr):
            found.add(type(node).__name__)
        elif isinstance(node, Expr) and not is_symbolic and not node.free_symbols:
            found.add(_arithmetic(node))
    return found - {""}


def _arithmetic(node: Expr) -> str:
    """Return the kind of an operation on numbers, or "" for notation: signs, fractions, roots, powers of ten."""
    if isinstance(node, TrigonometricFunction | InverseTrigonometricFunction):
        return "trigonometric"
    if isinstance(node, Function | Max | Min):
        return "" if isinstance(node, exp) else type(node).__name__
    numbers = [arg for arg in node.args if isinstance(arg, Rational | Float)]
    if node.is_Add:
        return "Add" if len(numbers) > 1 else ""
    if node.is_Mul:
        return "Mul" if sum(number not in (1, -1) for number in numbers) > 1 else ""
    if node.is_Pow and len(numbers) == 2:
        base, power = numbers
        if power == -1 or base == 10:
            return ""
        is_root = isinstance(power, Rational) and not isinstance(power, Integer)
        is_small = len(str(base)) <= MAX_ROOT_DIGITS and abs(power) <= MAX_ROOT_DIGITS
        return "Pow" if not is_root or (is_small and isinstance(base**power, Rational)) else ""
    return ""
