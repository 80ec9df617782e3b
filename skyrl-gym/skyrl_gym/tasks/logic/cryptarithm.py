"""Find the digits behind the letters of an equation that has one solution."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from string import ascii_uppercase
from typing import Any

from skyrl_gym.tasks.logic.puzzle import Puzzle

_CLAIM = re.compile(r"the answer is[:\s]*([0-9+\-*= ]{3,200})", re.ASCII | re.IGNORECASE)


def create(rng: Random) -> Puzzle:
    """Create an equation of four to eight letters with one to three operators of + and -, or one *."""
    draw = rng.choice((_product, _sum, _sum, _sum))
    while True:
        numbers, operators = draw(rng)
        digits = sorted(set("".join(map(str, numbers))))
        if not 4 <= len(digits) <= 8:
            continue
        letter = dict(zip(digits, rng.sample(ascii_uppercase, len(digits)), strict=True))
        words = ["".join(letter[digit] for digit in str(number)) for number in numbers]
        if len(list(islice(solutions(words, operators), 2))) == 1:
            break
    puzzle, answer = _equation(words, operators), _equation(list(map(str, numbers)), operators)
    prompt = (
        "Each letter stands for a digit, different letters for different digits, and no number starts with 0. Find "
        f"the digits that make this equation true; there is one solution.\n\n{puzzle}\n\n"
        'End your reply with "The answer is" and the equation in digits, such as: The answer is 12 + 34 = 46'
    )
    return Puzzle(prompt, answer, f"The answer is {answer}")


def is_correct(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last equation after "The answer is" is the solution."""
    claims = _CLAIM.findall(answer)
    return bool(claims) and "".join(claims[-1].split()) == "".join(truth.split())


def solutions(words: Sequence[str], operators: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield the digits of every solution of ``words[0] operators[0] words[1] … = words[-1]``."""
    if "*" in operators:
        yield from _solve_product(words)
        return
    signs = [1, *(1 if operator == "+" else -1 for operator in operators), -1]
    columns: list[dict[str, int]] = [{} for _ in range(max(map(len, words)))]
    for sign, word in zip(signs, words, strict=True):
        for column, letter in zip(columns, reversed(word), strict=False):
            column[letter] = column.get(letter, 0) + sign
    yield from _solve_columns([list(column.items()) for column in columns], {word[0] for word in words}, 0, 0, 0, 0, {})


def _solve_columns(
    columns: Sequence[Sequence[tuple[str, int]]],
    first: set[str],
    column: int,
    position: int,
    carry: int,
    total: int,
    digits: dict[str, int],
) -> Iterator[dict[str, int]]:
    """Assign digits column by column from the right, letter by letter. Every column's sum must end with 0.

    In SEND + MORE = MONEY, the first column is D + E - Y. With D = 7 and E = 5, only Y = 2 makes it end with 0: 12 - 2
    = 10, and 1 is carried to the second column, N + R - E + 1. Wrong digits are thus rejected after a column, instead
    of after all eight letters. At the end, nothing may be left to carry.
    """
    while column < len(columns):
        letters = columns[column]
        if position == len(letters):
            if (total + carry) % 10:
                return
            column, position, carry, total = column + 1, 0, (total + carry) // 10, 0
            continue
        letter, factor = letters[position]
        if letter in digits:
            position, total = position + 1, total + factor * digits[letter]
            continue
        is_last = position + 1 == len(letters)
        for digit in range(letter in first, 10):
            sum_so_far = total + factor * digit
            if (is_last and (sum_so_far + carry) % 10) or digit in digits.values():
                continue
            digits[letter] = digit
            yield from _solve_columns(columns, first, column, position + 1, carry, sum_so_far, digits)
            del digits[letter]
        return
    if carry == 0:
        yield dict(digits)


def _solve_product(words: Sequence[str]) -> Iterator[dict[str, int]]:
    left, right, result = words
    for a in _numbers(left):
        for b in _numbers(right):
            text = f"{a}{b}{a * b}"
            if len(text) != len(left + right + result):
                continue
            pairs = set(zip(left + right + result, text, strict=True))
            if len(pairs) == len({letter for letter, _ in pairs}) == len({digit for _, digit in pairs}):
                yield {letter: int(digit) for letter, digit in pairs}


def _numbers(word: str) -> range:
    return range(10 ** (len(word) - 1), 10 ** len(word))


def _sum(rng: Random) -> tuple[list[int], list[str]]:
    """Return the numbers and operators of a true equation with a positive result."""
    while True:
        n_terms = rng.choice((2, 2, 2, 3, 4))
        n_digits = rng.choice((3, 4)) if n_terms == 2 else 3
        numbers = [rng.randint(10 ** (n_digits - 1), 10**n_digits - 1) for _ in range(n_terms)]
        operators = [rng.choice("++-") for _ in range(n_terms - 1)]
        result = numbers[0] + sum(
            number if operator == "+" else -number for operator, number in zip(operators, numbers[1:], strict=True)
        )
        if result > 0:
            return [*numbers, result], operators


def _product(rng: Random) -> tuple[list[int], list[str]]:
    left, right = rng.randint(10, 99), rng.randint(2, 99)
    return [left, right, left * right], ["*"]


def _equation(terms: Sequence[str], operators: Sequence[str]) -> str:
    left = terms[0] + "".join(f" {o} {term}" for o, term in zip(operators, terms[1:-1], strict=True))
    return f"{left} = {terms[-1]}"
