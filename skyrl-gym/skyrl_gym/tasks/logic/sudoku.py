"""Complete a Sudoku grid."""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from skyrl_gym.envs.lcb.grading import extract_code
from skyrl_gym.tasks.logic.puzzle import Puzzle

N_GIVENS = ((36, 45), (28, 35), (22, 27))
"""Minimum and maximum number of givens of an easy, a medium and a hard grid."""

_ROWS = re.compile(r"(?:[1-9]{9}\n){8}[1-9]{9}", re.ASCII)


def create(rng: Random) -> Puzzle:
    """Create a grid with 22 to 45 givens. Any valid completion is correct."""
    solution = _complete_grid(rng)
    low, high = rng.choices(N_GIVENS, weights=(3, 4, 3))[0]
    givens = set(rng.sample(range(81), rng.randint(low, high)))
    grid = "".join(digit if i in givens else "0" for i, digit in enumerate(solution))
    prompt = (
        "Solve this Sudoku: fill in the empty cells, shown as 0, so that every row, every column and every 3 × 3 box "
        f"holds the digits 1 to 9.\n\n{_lines(grid)}\n\n"
        "End your reply with the complete grid in a code block: nine lines of nine digits."
    )
    return Puzzle(prompt, solution, f"```\n{_lines(solution)}\n```", {"grid": grid})


def is_correct(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last code block is a valid grid with all givens."""
    block = (extract_code(answer) or "").strip()
    text = "\n".join("".join(line.split()) for line in block.splitlines())
    if not _ROWS.fullmatch(text):
        return False
    cells = text.replace("\n", "")
    keeps_givens = all(given in ("0", cell) for given, cell in zip(facts["grid"], cells, strict=True))
    return keeps_givens and is_valid_grid(cells)


def is_valid_grid(cells: str) -> bool:
    """Return True if every row, column and box of the 81 cells holds the digits 1 to 9."""
    rows = [cells[9 * i : 9 * i + 9] for i in range(9)]
    columns = [cells[i::9] for i in range(9)]
    boxes = ["".join(rows[3 * (i // 3) + k][3 * (i % 3) : 3 * (i % 3) + 3] for k in range(3)) for i in range(9)]
    return all(set(unit) == set("123456789") for unit in (*rows, *columns, *boxes))


def _complete_grid(rng: Random) -> str:
    """Return a valid grid: a fixed pattern with shuffled digits, rows and columns (within and between bands)."""

    def order() -> list[int]:
        return [3 * band + line for band in rng.sample(range(3), 3) for line in rng.sample(range(3), 3)]

    digits = rng.sample("123456789", 9)
    rows, columns = order(), order()
    return "".join(digits[(3 * (row % 3) + row // 3 + column) % 9] for row in rows for column in columns)


def _lines(cells: str) -> str:
    return "\n".join(cells[9 * i : 9 * i + 9] for i in range(9))
