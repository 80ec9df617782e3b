"""Reach a target using every number once, or say that it is impossible."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Any

from skyrl_gym.envs.lcb.grading import extract_code
from skyrl_gym.tasks.logic.puzzle import Puzzle

LOW, HIGH = (1, 2, 3, 5), tuple(range(9, 21))
TARGETS = (24, 36, 48, 60, 72, 100)
OPERATORS = ("+-*/", "+-*", "+-")
UNSOLVABLE = "None"
UNSOLVABLE_SHARE = 0.15  # of the puzzles with four numbers
MAX_EXPRESSION_CHARS = 200

_EXPRESSION = re.compile(r"[0-9+\-*/() \n]+", re.ASCII)
_NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def create(rng: Random) -> Puzzle:
    """Create a puzzle of four to six numbers. Puzzles with four may have no solution."""
    n_numbers = rng.choice((4, 4, 4, 4, 5, 6))
    if n_numbers == 4:
        keeps_unsolvable = rng.random() < UNSOLVABLE_SHARE
        while True:
            operators, target = rng.choice(OPERATORS), rng.choice(TARGETS)
            numbers = [rng.choice(LOW + HIGH) for _ in range(4)]
            answer = _search(tuple(sorted(numbers)), target, operators) or UNSOLVABLE
            if (answer == UNSOLVABLE) == keeps_unsolvable:
                break
    else:
        operators, target = rng.choice(OPERATORS), rng.choice(TARGETS)
        numbers, answer = _construct(rng, n_numbers, target, operators)
        rng.shuffle(numbers)
    shown = ", ".join(map(str, numbers))
    prompt = (
        f"Write an expression with the value {target} that uses each of the numbers {shown} exactly once, the "
        f"operators {' '.join(operators)} and parentheses.\n\nReply with the expression in a code block:\n\n"
        "```python\n(1 + 2) * 3\n```\n\n"
        f"If there is no such expression, write {UNSOLVABLE} in the code block."
    )
    facts = {"numbers": numbers, "target": target, "operators": operators, "is_solvable": answer != UNSOLVABLE}
    return Puzzle(prompt, answer, f"```python\n{answer}\n```", facts)


def is_correct(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last code block holds an expression with the target's value, or None if unsolvable."""
    expression = (extract_code(answer) or "").strip()
    if expression == UNSOLVABLE:
        return not facts["is_solvable"]
    if len(expression) > MAX_EXPRESSION_CHARS or not _EXPRESSION.fullmatch(expression):
        return False
    try:
        tree = ast.parse(expression, mode="eval").body
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        if Counter(used) != Counter(facts["numbers"]):
            return False
        return _value(tree, facts["operators"]) == facts["target"]
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr, operators: str) -> Fraction:
    """Return the value of a parsed expression. Raises ValueError for anything but the allowed operators."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or _NODES.get(type(node.op), "none") not in operators:
        raise ValueError(f"{ast.dump(node)} is not an allowed operation")
    return _apply(_NODES[type(node.op)], _value(node.left, operators), _value(node.right, operators))


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[operator](right)


@lru_cache(maxsize=4096)
def _search(numbers: tuple[int, ...], target: int, operators: str) -> str | None:
    """Search all expressions. Return the first with the target's value, or None if there is none."""
    start = [(Fraction(number), str(number)) for number in numbers]
    return next(_expressions(start, Fraction(target), operators), None)


def _expressions(items: Sequence[tuple[Fraction, str]], target: Fraction, operators: str) -> Iterator[str]:
    if len(items) == 1:
        if items[0][0] == target:
            yield items[0][1].removeprefix("(").removesuffix(")")
        return
    for i, (left, left_text) in enumerate(items):
        for j, (right, right_text) in enumerate(items):
            if i == j:
                continue
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            for operator in operators:
                if (operator in "+*" and i > j) or (operator == "/" and right == 0):
                    continue
                merged = (_apply(operator, left, right), f"({left_text} {operator} {right_text})")
                yield from _expressions([merged, *rest], target, operators)


def _construct(rng: Random, n_numbers: int, target: int, operators: str) -> tuple[list[int], str]:
    """Return numbers and an expression with the target's value, built backwards from the target."""
    while True:
        value, numbers, steps = target, [], []
        for _ in range(n_numbers - 1):
            number, operator = rng.choice(LOW + HIGH), rng.choice(operators)
            if operator == "*" and value % number:
                operator = rng.choice("+-")
            value = {"+": value - number, "-": value + number, "*": value // number, "/": value * number}[operator]
            numbers.append(number)
            steps.append((operator, number))
        if value in LOW + HIGH:
            text = str(value)
            for n, (operator, number) in enumerate(reversed(steps)):
                text = f"{f'({text})' if n else text} {operator} {number}"
            return [value, *numbers], text
