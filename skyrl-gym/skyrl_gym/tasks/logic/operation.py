"""Evaluate an expression with newly defined operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from skyrl_gym.maths import last_boxed
from skyrl_gym.tasks.logic.puzzle import Puzzle
from skyrl_gym.tasks.replies import parse_number

SYMBOLS = ("△", "◎", "★", "◇", "▲", "⊙", "⊗")
MAX_RESULT = 100_000


@dataclass(frozen=True, slots=True)
class Formula:
    """The formula ``ab·a·b + a_factor·a + b_factor·b + constant``."""

    ab: int
    a_factor: int
    b_factor: int
    constant: int

    def value(self, a: int, b: int) -> int:
        """Return the value."""
        return self.ab * a * b + self.a_factor * a + self.b_factor * b + self.constant

    def __str__(self) -> str:
        terms = ((self.ab, "a × b"), (self.a_factor, "a"), (self.b_factor, "b"), (self.constant, ""))
        text = ""
        for factor, name in terms:
            if factor:
                size = f"{abs(factor)} × {name}" if name and abs(factor) != 1 else name or str(abs(factor))
                text += f" {'-' if factor < 0 else '+'} {size}" if text else f"{'-' if factor < 0 else ''}{size}"
        return text or "0"


CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "a is even": lambda a, b: a % 2 == 0,
    "b is even": lambda a, b: b % 2 == 0,
    "a is greater than b": lambda a, b: a > b,
    "a + b is a multiple of 3": lambda a, b: (a + b) % 3 == 0,
}


@dataclass(frozen=True, slots=True)
class Definition:
    """An operator with one formula, or with two formulas and a condition for the first."""

    formula: Formula
    condition: str | None
    otherwise: Formula

    def value(self, a: int, b: int) -> int:
        """Return the result of the operator."""
        applies = self.condition is None or CONDITIONS[self.condition](a, b)
        return (self.formula if applies else self.otherwise).value(a, b)

    def describe(self, symbol: str) -> str:
        """Return the definition as a sentence."""
        start = f"a {symbol} b = {self.formula}"
        return start if self.condition is None else f"{start} if {self.condition}, otherwise {self.otherwise}"


def create(rng: Random) -> Puzzle:
    """Create an expression of three to five numbers and one to three new operators."""
    while True:
        symbols = rng.sample(SYMBOLS, rng.randint(1, 3))
        definitions = {symbol: _define(rng) for symbol in symbols}
        n_operators = rng.randint(max(2, len(symbols)), 4)
        operators = symbols + [rng.choice([*symbols, "+", "-"]) for _ in range(n_operators - len(symbols))]
        rng.shuffle(operators)
        numbers = [rng.randint(1, 12) for _ in range(n_operators + 1)]
        result = evaluate(numbers, operators, symbols, definitions)
        if abs(result) < MAX_RESULT:
            break
    expression = str(numbers[0]) + "".join(f" {o} {n}" for o, n in zip(operators, numbers[1:], strict=True))
    order = f"First {', then '.join(symbols)}, then + and -; operators of the same rank from left to right."
    prompt = (
        "New operators are defined:\n\n"
        + "\n".join(definitions[symbol].describe(symbol) for symbol in symbols)
        + f"\n\nOrder: {order}\n\nCalculate {expression}\n\nWrite the result in \\boxed{{}}."
    )
    return Puzzle(prompt, str(result), f"\\boxed{{{result}}}")


def evaluate(
    numbers: list[int], operators: list[str], symbols: list[str], definitions: Mapping[str, Definition]
) -> int:
    """Evaluate numbers with operators between them: the symbols in order, then + and -."""
    numbers, operators = list(numbers), list(operators)
    for rank in (*((symbol,) for symbol in symbols), ("+", "-")):
        i = 0
        while i < len(operators):
            if operators[i] not in rank:
                i += 1
                continue
            operator, a, b = operators.pop(i), numbers[i], numbers.pop(i + 1)
            if operator in definitions:
                numbers[i] = definitions[operator].value(a, b)
            else:
                numbers[i] = a + b if operator == "+" else a - b
    return numbers[0]


def is_correct(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last box holds the number."""
    number = parse_number(last_boxed(answer) or "")
    return number is not None and number == int(truth)


def _define(rng: Random) -> Definition:
    condition = rng.choice([None, None, *CONDITIONS])
    return Definition(_formula(rng), condition, _formula(rng))


def _formula(rng: Random) -> Formula:
    ab = rng.choice((0, 0, 1))
    return Formula(ab, rng.choice((-2, -1, 1, 2, 3)), rng.choice((-2, -1, 1, 2, 3)), rng.randint(-5, 5))
