r"""Equivalence of an answer and the ground truth, with math-verify.

math-verify decides whether two expressions are equal. An answer must also be one result:

- It has no operation left that the ground truth lacks: ``137\cdot248`` and ``\binom{20}{10}`` restate a question.
- The numbers in a chain of equations agree: ``41 = 42`` and ``42 \approx 41`` are no answer.
- Notation that changes a number counts: ``42\%`` is 0.42, ``42_{43}`` has another base, ``42 thousand`` is 42000.

Only the workers of `skyrl_gym.maths` import this module, because sympy is slow to import.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    Basic,
    Derivative,
    Expr,
    Float,
    Function,
    Integer,
    Integral,
    Limit,
    Max,
    Min,
    Mod,
    Product,
    Rational,
    Sum,
    UnevaluatedExpr,
    exp,
    preorder_traversal,
)
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

BOX = [LatexExtractionConfig(boxed_match_priority=0)]
APPROXIMATION = 0.005  # maximum relative difference between the sides of an approximation
MAX_ROOT_DIGITS = 40  # of a number whose roots are computed

_NAMES = ("times", "cdot", "cdot", "approx", "equiv", "leq", "geq", "neq", "pi", "infty", "pm")
_COMMANDS = {symbol: rf"\{name} " for symbol, name in zip("×·⋅≈≡≤≥≠π∞±", _NAMES, strict=True)}
_FRACTIONS = {"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
_SYMBOLS = str.maketrans("−–÷~", "--/ ", "€£") | str.maketrans(_COMMANDS | _FRACTIONS | {"°": r"^\circ "})
_MATHS_DELIMITER = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|\\[,! ]|,\\!| )\d{3})+(?!\d)", re.ASCII)
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent|pct)\s*\}|\b(?:percent(?:age)?|pct)\b)\.?\s*$", re.I)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\s*(?:\\text\s*\{{\s*)?\b({'|'.join(_SCALES)})\b(?:\s*\}})?", re.IGNORECASE)
_NUMBER = r"[-+]?(?:\\\$|\d)[\d.,]*(?:\s*/\s*\d+|\s+\d+/\d+)?|[-+]?\d*\\[dt]?frac\{\d+\}\{\d+\}"
_UNIT = re.compile(rf"({_NUMBER})((?:\s+[A-Za-z]{{2,}}){{1,4}})\.?", re.ASCII)
_NO_UNIT = re.compile(
    r"\b(?:or|and|to|not|mod|modulo|times|plus|minus|over|point|half|halves|thirds?|quarters?|dozens?|squared|cubed"
    r"|factorial|choose|base|than|more|less|pi|tau|phi|rho|mu|nu|xi|alpha|beta|gamma|delta|theta|lambda|sigma|omega"
    r"|sqrt|sin|cos|tan|log|ln|exp)\b",
    re.IGNORECASE,
)
_MIXED = re.compile(r"(?<![\d.,/])(\d+) +(\d+)/(\d+)", re.ASCII)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", re.ASCII)
_DECIMAL_BASE = re.compile(r"(?<=[\d}])_(?:\{10\}|10\b)")
_BASE = re.compile(r"[\d})]\s*_")
_JUXTAPOSED = re.compile(r"\d\s+\d+(?!\d*\s*/)|[\d)]\s*\(\s*-?[\d.]+\s*\)", re.ASCII)
"""Numbers side by side, which math-verify adds up."""
_OPERATION = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|bmod|pmod|mod|[dt]?binom|choose|gcd|lcm|max|min|sup|inf)(?![A-Za-z])"
    r"|(?<![A-Za-z])(?:mod|choose|gcd|lcm)(?![A-Za-z])"
)
_MODULUS = re.compile(r"\(?\s*\\?[pb]?mod\b.*$", re.DOTALL)
_NAMED = re.compile(r"^\s*\$?\s*[A-Za-z](?:_\w|\(\w\))?\s*=(?=(?:[^A-Za-z\\=]|\\[A-Za-z]+)*$)")
"""The name of a number, as in ``x = 42``."""
_RELATION = re.compile(r"(\\approx|\\simeq|\\equiv|=)(?![A-Za-z])")
_UNSPLIT = re.compile(
    r"[<>!:]\s*=|[<>]|\\(?:n?leq?|n?geq?|ne|neq|lt|gt|lor|land|cup|cap|pm|mp|in)(?![A-Za-z])|\\not|\bor\b|\band\b|[;&]"
)
_LIST_COMMA = re.compile(r",(?!\d{3}(?!\d))|\n")


def is_same(answer: str, gold: str) -> bool | None:
    """Return True if `answer` is a result equal to `gold`; None if math-verify cannot parse `gold`."""
    gold, gold_is_percent = _normalize(_NAMED.sub("", gold))
    parsed_gold = _parse(gold, is_percent=gold_is_percent)
    if not parsed_gold:
        return None
    answer, is_percent = _normalize(answer)
    sides, is_approximate = ([answer], False) if _RELATION.search(gold) else _split(answer)
    if is_approximate and not _are_close([_parse(side) for side in sides]):
        return False
    candidates = []
    for side in sides:
        if any(pattern.search(side) and not pattern.search(gold) for pattern in (_OPERATION, _BASE, _JUXTAPOSED)):
            continue
        if is_percent and not gold_is_percent:
            side = rf"\frac{{{side}}}{{100}}"
        parsed = _parse(side, is_percent=is_percent and gold_is_percent)
        if parsed and _operations(parsed, parsed_gold) <= _operations(parsed_gold, parsed_gold):
            candidates.append(parsed)
    return any(verify(parsed_gold, parsed, timeout_seconds=None) for parsed in candidates)


def _parse(text: str, *, is_percent: bool = False) -> list[Any]:
    text = rf"${text}$\%" if is_percent else rf"\boxed{{{text}}}"
    parsed: list[Any] = parse(text, BOX, parsing_timeout=None)
    return parsed


def _normalize(text: str) -> tuple[str, bool]:
    """Put a number's notation into a form that math-verify reads. Return the text without a percent sign, and whether
    it had one.
    """
    text = _MATHS_DELIMITER.sub(" ", text.translate(_SYMBOLS)).strip().rstrip(" .,;")
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
    """Return the sides of an equation that may be the result, and whether it is an approximation.

    No side may be the result if the numbers among them differ, as in ``41 = 42``.
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
    """Return True if the sides that are numbers are about equal."""
    numbers = [parsed[0].evalf(15) for parsed in sides if parsed and isinstance(parsed[0], Expr)]
    values = [float(number) for number in numbers if isinstance(number, Float)]
    return all(abs(value - values[0]) <= APPROXIMATION * abs(values[0]) for value in values)


def _operations(parsed: Sequence[Any], gold: Sequence[Any]) -> set[str]:
    """Return the kinds of operations that could still be carried out.

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
    """Return the kind of an operation on numbers; empty for notation: signs, fractions, roots, powers of ten."""
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
