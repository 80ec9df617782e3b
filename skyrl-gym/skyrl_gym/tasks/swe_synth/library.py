"""Functions to inject bugs into. Each is pure, and takes and returns JSON values.

Their sources are part of the tasks: changing a function changes its tasks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:
    """Merge intervals [start, end] that overlap or touch, and return them in order."""
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def run_lengths(text: str) -> list[list[Any]]:
    """Return the runs of equal characters as [character, length]."""
    runs: list[list[Any]] = []
    for char in text:
        if runs and runs[-1][0] == char:
            runs[-1][1] += 1
        else:
            runs.append([char, 1])
    return runs


def moving_average(values: list[int], width: int) -> list[float]:
    """Return the means of all windows of `width` neighbouring values; none if there are too few values."""
    return [sum(values[start : start + width]) / width for start in range(len(values) - width + 1)]


def binary_search(values: list[int], target: int) -> int:
    """Return the first index of `target` in sorted values, or -1."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < target:
            low = middle + 1
        else:
            high = middle
    if low < len(values) and values[low] == target:
        return low
    return -1


def word_wrap(text: str, width: int) -> list[str]:
    """Break text into lines of at most `width` characters, between words; a longer word has its own line."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = word if not line else line + " " + word
    if line:
        lines.append(line)
    return lines


def to_roman(number: int) -> str:
    """Return a number from 1 to 3999 in Roman numerals."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    signs = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    text = ""
    for value, sign in zip(values, signs, strict=True):
        while number >= value:
            text += sign
            number -= value
    return text


def second_largest(values: list[int]) -> int | None:
    """Return the second largest of the distinct values, or None if there are fewer than two."""
    first = None
    second = None
    for value in values:
        if first is None or value > first:
            second = first
            first = value
        elif value != first and (second is None or value > second):
            second = value
    return second


def group_by_length(words: list[str]) -> dict[str, list[str]]:
    """Group distinct words by their length, as text; each group is sorted."""
    groups: dict[str, list[str]] = {}
    for word in words:
        key = str(len(word))
        if key not in groups:
            groups[key] = []
        if word not in groups[key]:
            groups[key].append(word)
    return {key: sorted(groups[key]) for key in sorted(groups)}


def count_change(coins: list[int], amount: int) -> int:
    """Return the number of ways to pay an amount with any number of each coin."""
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    return ways[amount]


def edit_distance(left: str, right: str) -> int:
    """Return the number of insertions, deletions and replacements between two texts."""
    row = list(range(len(right) + 1))
    for i in range(1, len(left) + 1):
        previous = row[0]
        row[0] = i
        for j in range(1, len(right) + 1):
            cost = 0 if left[i - 1] == right[j - 1] else 1
            best = min(row[j] + 1, row[j - 1] + 1, previous + cost)
            previous = row[j]
            row[j] = best
    return row[len(right)]


def rotate_matrix(matrix: list[list[int]]) -> list[list[int]]:
    """Rotate a matrix by a quarter turn, clockwise."""
    n_rows, n_columns = len(matrix), len(matrix[0])
    return [[matrix[n_rows - 1 - row][column] for row in range(n_rows)] for column in range(n_columns)]


def longest_increasing_run(values: list[int]) -> list[int]:
    """Return the first longest run of neighbours that strictly increase."""
    best: list[int] = []
    run: list[int] = []
    for value in values:
        if run and value <= run[-1]:
            run = []
        run = [*run, value]
        if len(run) > len(best):
            best = run
    return best


@dataclass(frozen=True, slots=True)
class Subject:
    """A function and its test arguments."""

    function: Callable[..., Any]
    arguments: Callable[[Random], list[Any]]


def _numbers(rng: Random, low: int = 0, high: int = 9, least: int = 0, most: int = 8) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def _word(rng: Random, letters: str = "abc", least: int = 1, most: int = 6) -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(least, most)))


def _intervals(rng: Random) -> list[list[int]]:
    starts = _numbers(rng, 0, 15, most=6)
    return [[start, start + rng.randint(0, 5)] for start in starts]


def _matrix(rng: Random) -> list[list[int]]:
    width = rng.randint(1, 4)
    return [_numbers(rng, least=width, most=width) for _ in range(rng.randint(1, 4))]


SUBJECTS = {
    "merge_intervals": Subject(merge_intervals, lambda rng: [_intervals(rng)]),
    "run_lengths": Subject(run_lengths, lambda rng: [_word(rng, "ab", 0, 9)]),
    "moving_average": Subject(moving_average, lambda rng: [_numbers(rng), rng.randint(1, 4)]),
    "binary_search": Subject(binary_search, lambda rng: [sorted(_numbers(rng)), rng.randint(0, 9)]),
    "word_wrap": Subject(word_wrap, lambda rng: [" ".join(_word(rng) for _ in range(7)), rng.randint(4, 12)]),
    "to_roman": Subject(to_roman, lambda rng: [rng.randint(1, 3999)]),
    "second_largest": Subject(second_largest, lambda rng: [_numbers(rng, 0, 5)]),
    "group_by_length": Subject(group_by_length, lambda rng: [[_word(rng, most=3) for _ in range(6)]]),
    "count_change": Subject(count_change, lambda rng: [rng.sample((1, 2, 3, 5, 7), 3), rng.randint(0, 15)]),
    "edit_distance": Subject(edit_distance, lambda rng: [_word(rng), _word(rng)]),
    "rotate_matrix": Subject(rotate_matrix, lambda rng: [_matrix(rng)]),
    "longest_increasing_run": Subject(longest_increasing_run, lambda rng: [_numbers(rng, most=9)]),
}
"""The functions by name."""
