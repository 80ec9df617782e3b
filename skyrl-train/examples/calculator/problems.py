"""Word problems on numbers of two digits, with wordings and pairs of numbers that training never sees."""

import random
from dataclasses import dataclass
from typing import Any

from examples.calculator.env import evaluate

NUMBERS = range(12, 99)
N_HELD_OUT = 5
"""One in five pairs of numbers is only for validation."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A text with the numbers a and b, and the expression that solves it."""

    text: str
    expression: str


INSTRUCTION = "Solve the problem with the calculator, and end your answer with the result."
TRAINING = (
    Wording("A crate holds {a} apples. How many apples are in {b} crates?", "{a} * {b}"),
    Wording("Each of {b} shelves has {a} books. How many books are there?", "{a} * {b}"),
    Wording("A ticket costs {a} dollars. What do {b} tickets cost?", "{a} * {b}"),
    Wording("What is {a} times {b}?", "{a} * {b}"),
    Wording("Anna has {a} stamps and gets {b} more. How many does she have now?", "{a} + {b}"),
    Wording("A train has {a} passengers, and {b} board. How many are on it?", "{a} + {b}"),
    Wording("What is the sum of {a} and {b}?", "{a} + {b}"),
    Wording("A shop had 1{a} lamps and sold {b}. How many are left?", "1{a} - {b}"),
    Wording("How much is 1{a} minus {b}?", "1{a} - {b}"),
    Wording("Lena had 1{a} coins and spent {b}. How many does she have now?", "1{a} - {b}"),
    Wording("Of 1{a} seats, {b} are taken. How many are free?", "1{a} - {b}"),
    Wording("A rope is 1{a} meters long. {b} meters are cut off. How long is it now?", "1{a} - {b}"),
)
HELD_OUT = (
    Wording("There are {b} rows of {a} chairs. How many chairs is that?", "{a} * {b}"),
    Wording("A worker earns {a} dollars an hour. How much does she earn in {b} hours?", "{a} * {b}"),
    Wording("Ben picked {a} pears and his sister {b}. How many did they pick together?", "{a} + {b}"),
    Wording("A tank of 1{a} liters loses {b} liters. How many liters remain?", "1{a} - {b}"),
)


def problems(wordings: tuple[Wording, ...], n: int, *, is_held_out: bool, seed: int) -> list[dict[str, Any]]:
    """Return n different dataset rows. The wordings take turns."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < n:
        wording, numbers = wordings[len(rows) % len(wordings)], {name: rng.choice(NUMBERS) for name in "ab"}
        if ((numbers["a"] * 31 + numbers["b"]) % N_HELD_OUT == 0) == is_held_out:
            text, expression = wording.text.format(**numbers), wording.expression.format(**numbers)
            rows[text] = {
                "data_source": "calculator",
                "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}],
                "env_class": "calculator",
                "reward_spec": {"ground_truth": evaluate(expression)},
                "extra_info": {"expression": expression},
            }
    return list(rows.values())
