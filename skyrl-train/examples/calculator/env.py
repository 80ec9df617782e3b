"""Word problems that the model solves with a calculator."""

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs import register
from skyrl_gym.envs.tool_env import ToolEnv
from skyrl_gym.tools.core import ToolGroup, tool

OPERATORS: Mapping[type[ast.operator], Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_CHARS = 60


class Calculator(ToolGroup):
    """A tool for integers."""

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an expression such as 2 + 2."""
        return evaluate(expression)


def evaluate(expression: str) -> str:
    """Return the value of an expression of integers, +, - and *.

    >>> evaluate("17 * 23 - 1")
    '390'

    Raises:
        ValueError: it is something else, or longer than `MAX_CHARS`.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are allowed")
    try:
        return str(_evaluate(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression") from error


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:  # not True
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result: int = OPERATORS[type(op)](_evaluate(left), _evaluate(right))
            return result
    raise ValueError(f"{ast.unparse(node)} is not an integer, +, - or *")


class CalculatorEnv(ToolEnv):
    """The reward is 1 if the answer ends with the number `reward_spec.ground_truth`, as its prompt asks, else 0."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__([Calculator("calculator")], max_turns=int(extras.get("max_turns", 3)))
        self._truth = str(extras["reward_spec"]["ground_truth"])

    def score(self, answer: str) -> float:
        numbers = re.findall(r"-?\d+(?:,\d{3})*", answer)
        return float(bool(numbers) and numbers[-1].replace(",", "") == self._truth)


register(id="calculator", entry_point="examples.calculator.env:CalculatorEnv")
