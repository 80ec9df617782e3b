"""Find the true statements among combinations of facts with "and", "or" and "not"."""

import calendar
import re
from collections.abc import Mapping
from random import Random
from string import ascii_uppercase
from typing import Any

from skyrl_gym.maths import last_boxed
from skyrl_gym.tasks.logic.puzzle import Puzzle

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Portugal": "Lisbon",
    "Thailand": "Bangkok",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Cuba": "Havana",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_LETTERS = re.compile(r"[A-Z](?:,[A-Z])*")


def create(rng: Random) -> Puzzle:
    """Create three to six options. At least one is true."""
    while True:
        options = [_expression(rng, depth=rng.randint(1, 2)) for _ in range(rng.randint(3, 6))]
        if any(is_true for _, is_true in options):
            break
    letters = ascii_uppercase[: len(options)]
    lines = "\n".join(f"{letter}. {text}" for letter, (text, _) in zip(letters, options, strict=True))
    answer = ",".join(letter for letter, (_, is_true) in zip(letters, options, strict=True) if is_true)
    prompt = (
        f"Which of these statements are true?\n\n{lines}\n\n"
        "Write the letters of all true statements, separated by commas, in \\boxed{}, such as \\boxed{A,C}."
    )
    return Puzzle(prompt, answer, f"\\boxed{{{answer}}}")


def is_correct(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last box holds exactly these letters, in any order and case."""
    letters = re.sub(r"\s|\\text\b|[{}]", "", last_boxed(answer) or "").upper()
    return bool(_LETTERS.fullmatch(letters)) and set(letters.split(",")) == set(truth.split(","))


def _expression(rng: Random, depth: int) -> tuple[str, bool]:
    """Return a statement and its truth value."""
    if depth == 0:
        return _fact(rng)
    kind = rng.choice(("and", "or", "not"))
    left, is_left = _expression(rng, depth - 1)
    if kind == "not":
        return f"not ({left})", not is_left
    right, is_right = _expression(rng, depth - 1)
    return f"({left}) {kind} ({right})", (is_left and is_right) if kind == "and" else (is_left or is_right)


def _fact(rng: Random) -> tuple[str, bool]:
    """Return a simple statement with a random truth value."""
    kind = rng.randrange(6)
    if kind == 0:
        country, city = rng.choice(list(CAPITALS)), rng.choice(list(CAPITALS.values()))
        city = rng.choice((city, CAPITALS[country]))
        return f"{city} is the capital of {country}", CAPITALS[country] == city
    if kind == 1:
        number = rng.randrange(2, 120)
        return f"{number} is a prime number", all(number % divisor for divisor in range(2, number))
    if kind == 2:
        year = rng.randrange(1800, 2100, 2)
        return f"{year} is a leap year", calendar.isleap(year)
    if kind == 3:
        day, later = rng.randrange(7), rng.randrange(1, 4)
        shown = (day + later + rng.choice((0, 0, 1))) % 7
        days = "day" if later == 1 else "days"
        return f"{DAYS[shown]} is {later} {days} after {DAYS[day]}", shown == (day + later) % 7
    if kind == 4:
        a, b = rng.randint(2, 19), rng.randint(2, 19)
        shown = a * b + rng.choice((0, 0, -1, 1, 10))
        return f"{a} × {b} = {shown}", shown == a * b
    number, divisor = rng.randint(20, 300), rng.randint(3, 9)
    return f"{number} is divisible by {divisor}", number % divisor == 0
