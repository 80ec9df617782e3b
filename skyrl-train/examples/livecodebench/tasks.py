"""Small programming tasks with tests and solutions, written for this project.

They are for first runs and tests, and far easier than LiveCodeBench.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Tests = Sequence[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """A programming task.

    title: unique title.
    problem: the text of the task.
    tests: pairs of input and expected output: texts for a program, arguments and return value for a function.
    solution: a program that passes the tests.
    starter_code: the signature of the function. Empty for a complete program.
    """

    title: str
    problem: str
    tests: Tests
    solution: str
    starter_code: str = ""

    def tests_as_json(self) -> str:
        """Return the tests in LiveCodeBench's format."""
        return json.dumps([self._test(given, expected) for given, expected in self.tests])

    def _test(self, given: Any, expected: Any) -> dict[str, Any]:
        if not self.starter_code:
            return {"input": given, "output": expected, "testtype": "stdin"}
        name = self.starter_code.removeprefix("def ").partition("(")[0]
        lines = "\n".join(json.dumps(argument) for argument in given)
        call = {"func_name": name}
        return {"input": lines, "output": json.dumps(expected), "testtype": "functional", "metadata": call}


PROGRAMS = (
    Task(
        "sum of two",
        "Read two integers, each on a line of its own. Print their sum.",
        [("3\n4\n", "7\n"), ("-5\n5\n", "0\n"), ("1000000000000\n1\n", "1000000000001\n")],
        "print(int(input()) + int(input()))",
    ),
    Task(
        "vowels",
        "Read a line of lower-case text. Print how many of its letters are vowels: a, e, i, o or u.",
        [("banana\n", "3\n"), ("rhythm\n", "0\n"), ("a quiet evening\n", "7\n"), ("\n", "0\n")],
        "print(sum(letter in 'aeiou' for letter in input()))",
    ),
    Task(
        "running maximum",
        "The first line holds a number n (1 ≤ n ≤ 1000), the second n integers. Print n integers on one line, "
        "separated by spaces: the k-th is the largest of the first k.",
        [("5\n1 3 2 5 4\n", "1 3 3 5 5\n"), ("1\n-7\n", "-7\n"), ("4\n-4 -3 -9 -1\n", "-4 -3 -3 -1\n")],
        "from itertools import accumulate\ninput()\nprint(*accumulate(map(int, input().split()), max))",
    ),
    Task(
        "balanced brackets",
        "Read a line of brackets ()[]{}, at most 100000 of them. Print YES if every bracket is closed by one of its "
        "kind in the right order, and NO otherwise.",
        [
            ("([]{})\n", "YES\n"),
            ("([)]\n", "NO\n"),
            ("((\n", "NO\n"),
            ("}\n", "NO\n"),
            ("{[()()]}[]\n", "YES\n"),
            ("(" * 30000 + ")" * 30000 + "\n", "YES\n"),
        ],
        "opening = {')': '(', ']': '[', '}': '{'}\n"
        "stack, balanced = [], True\n"
        "for bracket in input().strip():\n"
        "    if bracket not in opening:\n"
        "        stack.append(bracket)\n"
        "    elif not stack or stack.pop() != opening[bracket]:\n"
        "        balanced = False\n"
        "        break\n"
        "print('YES' if balanced and not stack else 'NO')",
    ),
    Task(
        "most frequent word",
        "Read all lines of a text in lower case, without punctuation. Print the word that occurs most often. If there "
        "are several, print the one that comes first in the alphabet.",
        [
            ("the cat saw the dog\n", "the\n"),
            ("b a\nb a\n", "a\n"),
            ("one\n\ntwo two\none two\n", "two\n"),
            ("word\n", "word\n"),
        ],
        "import sys\nfrom collections import Counter\n"
        "counts = Counter(sys.stdin.read().split())\n"
        "print(min(counts, key=lambda word: (-counts[word], word)))",
    ),
    Task(
        "steps to one",
        "Read a positive integer n, at most 1000000. If it is even, halve it; if it is odd, triple it and add one; go "
        "on until it is 1. Print how many steps that takes.",
        [("1\n", "0\n"), ("6\n", "8\n"), ("27\n", "111\n"), ("1024\n", "10\n")],
        "n, steps = int(input()), 0\n"
        "while n != 1:\n"
        "    n = n // 2 if n % 2 == 0 else 3 * n + 1\n"
        "    steps += 1\n"
        "print(steps)",
    ),
    Task(
        "shortest way",
        "The first line holds the height h and the width w of a grid (1 ≤ h, w ≤ 50); h lines of w characters follow, "
        "a dot for a free cell and # for a wall. Print the smallest number of steps, up, down, left or right, from the "
        "upper left to the lower right cell, both of which are free; print -1 if there is no way.",
        [
            ("1 1\n.\n", "0\n"),
            ("2 2\n..\n..\n", "2\n"),
            ("3 3\n.#.\n.#.\n...\n", "4\n"),
            ("3 3\n.#.\n##.\n...\n", "-1\n"),
            ("3 5\n.#...\n.#.#.\n...#.\n", "10\n"),
            ("50 50\n" + ("." * 50 + "\n") * 50, "98\n"),
        ],
        "from collections import deque\n"
        "height, width = map(int, input().split())\n"
        "grid = [input() for _ in range(height)]\n"
        "steps, queue = {(0, 0): 0}, deque([(0, 0)])\n"
        "while queue:\n"
        "    y, x = queue.popleft()\n"
        "    for cell in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):\n"
        "        inside = 0 <= cell[0] < height and 0 <= cell[1] < width\n"
        "        if inside and cell not in steps and grid[cell[0]][cell[1]] == '.':\n"
        "            steps[cell] = steps[y, x] + 1\n"
        "            queue.append(cell)\n"
        "print(steps.get((height - 1, width - 1), -1))",
    ),
    Task(
        "coins",
        "The first line holds an amount (0 ≤ amount ≤ 10000), the second the values of coins, positive integers; of "
        "each there are as many as needed. Print the smallest number of coins that make up the amount, or -1 if "
        "none do.",
        [
            ("11\n1 2 5\n", "3\n"),
            ("3\n2\n", "-1\n"),
            ("0\n7\n", "0\n"),
            ("6\n1 3 4\n", "2\n"),
            ("10000\n1 9\n", "1112\n"),
        ],
        "amount = int(input())\n"
        "coins = list(map(int, input().split()))\n"
        "fewest = [0] + [amount + 1] * amount\n"
        "for part in range(1, amount + 1):\n"
        "    fewest[part] = min([fewest[part - coin] + 1 for coin in coins if coin <= part] + [amount + 1])\n"
        "print(fewest[amount] if fewest[amount] <= amount else -1)",
    ),
    Task(
        "table of sales",
        "The first line holds a number n (1 ≤ n ≤ 1000). Each of the n lines that follow holds a name and an integer, "
        "separated by a space. For each name, print a line with the name and the sum of its integers, in alphabetical "
        "order of the names.",
        [
            ("3\nbo 2\nal 5\nbo 1\n", "al 5\nbo 3\n"),
            ("1\nzoe -4\n", "zoe -4\n"),
            ("4\nc 1\nb 1\na 1\nc 1\n", "a 1\nb 1\nc 2\n"),
        ],
        "sums = {}\n"
        "for _ in range(int(input())):\n"
        "    name, number = input().split()\n"
        "    sums[name] = sums.get(name, 0) + int(number)\n"
        "for name in sorted(sums):\n"
        "    print(name, sums[name])",
    ),
)

FUNCTIONS = (
    Task(
        "reverse words",
        "Return the words of a text, which are separated by spaces, in the opposite order, separated by single spaces.",
        [(["the sky is blue"], "blue is sky the"), (["  a   b "], "b a"), ([""], "")],
        "def reverse_words(text):\n    return ' '.join(reversed(text.split()))",
        "def reverse_words(text: str) -> str:",
    ),
    Task(
        "two that add up",
        "Return the positions of the two numbers whose sum is the target, the smaller position first. There is exactly "
        "one such pair.",
        [([[2, 7, 11, 15], 9], [0, 1]), ([[3, 2, 4], 6], [1, 2]), ([[3, 3], 6], [0, 1]), ([[-1, 0, 5], 4], [0, 2])],
        "def two_that_add_up(numbers, target):\n"
        "    seen = {}\n"
        "    for i, number in enumerate(numbers):\n"
        "        if target - number in seen:\n"
        "            return [seen[target - number], i]\n"
        "        seen[number] = i",
        "def two_that_add_up(numbers: list[int], target: int) -> list[int]:",
    ),
    Task(
        "merge intervals",
        "Return the union of closed intervals [first, last] as intervals that do not meet, sorted. Intervals that "
        "share an end meet.",
        [
            ([[[1, 3], [2, 6], [8, 10]]], [[1, 6], [8, 10]]),
            ([[[4, 5], [1, 4]]], [[1, 5]]),
            ([[]], []),
            ([[[1, 10], [2, 3]]], [[1, 10]]),
        ],
        "def merge_intervals(intervals):\n"
        "    merged = []\n"
        "    for first, last in sorted(intervals):\n"
        "        if merged and first <= merged[-1][1]:\n"
        "            merged[-1][1] = max(merged[-1][1], last)\n"
        "        else:\n"
        "            merged.append([first, last])\n"
        "    return merged",
        "def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:",
    ),
    Task(
        "roman numerals",
        "Return a number from 1 to 3999 as a Roman numeral.",
        [([4], "IV"), ([9], "IX"), ([58], "LVIII"), ([1994], "MCMXCIV"), ([3999], "MMMCMXCIX")],
        "def to_roman(number):\n"
        "    signs = {1000: 'M', 900: 'CM', 500: 'D', 400: 'CD', 100: 'C', 90: 'XC', 50: 'L', 40: 'XL', 10: 'X',\n"
        "             9: 'IX', 5: 'V', 4: 'IV', 1: 'I'}\n"
        "    text = ''\n"
        "    for value, sign in signs.items():\n"
        "        text += sign * (number // value)\n"
        "        number %= value\n"
        "    return text",
        "def to_roman(number: int) -> str:",
    ),
    Task(
        "longest run",
        "Return the length of the longest run of equal numbers that follow each other in a list.",
        [([[1, 1, 2, 2, 2, 3]], 3), ([[]], 0), ([[5]], 1), ([[1, 2, 1, 2]], 1), ([[7] * 1000], 1000)],
        "def longest_run(numbers):\n    return max((len(list(run)) for _, run in groupby(numbers)), default=0)",
        "def longest_run(numbers: list[int]) -> int:",
    ),
    Task(
        "spiral",
        "Return the numbers of a matrix in the order of a spiral: along the first row to the right, down the last "
        "column, back along the last row, up the first column, and so on inwards.",
        [
            ([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], [1, 2, 3, 6, 9, 8, 7, 4, 5]),
            ([[[1, 2, 3, 4]]], [1, 2, 3, 4]),
            ([[[1], [2], [3]]], [1, 2, 3]),
            ([[[1, 2], [3, 4], [5, 6]]], [1, 2, 4, 6, 5, 3]),
        ],
        "def spiral(matrix):\n"
        "    numbers = []\n"
        "    while matrix:\n"
        "        numbers += matrix[0]\n"
        "        matrix = [list(row) for row in zip(*matrix[1:])][::-1]\n"
        "    return numbers",
        "def spiral(matrix: list[list[int]]) -> list[int]:",
    ),
    Task(
        "edit distance",
        "Return how many letters must at least be inserted, deleted or replaced to make one word of another; each has "
        "at most 200 letters.",
        [
            (["kitten", "sitting"], 3),
            (["", "abc"], 3),
            (["same", "same"], 0),
            (["flaw", "lawn"], 2),
            (["a" * 200, "b" * 200], 200),
        ],
        "def edit_distance(first, second):\n"
        "    distances = list(range(len(second) + 1))\n"
        "    for i, letter in enumerate(first, 1):\n"
        "        above, distances[0] = distances[0], i\n"
        "        for j, other in enumerate(second, 1):\n"
        "            best = min(distances[j] + 1, distances[j - 1] + 1, above + (letter != other))\n"
        "            above, distances[j] = distances[j], best\n"
        "    return distances[-1]",
        "def edit_distance(first: str, second: str) -> int:",
    ),
    Task(
        "primes",
        "Return all primes below a limit, the smallest first.",
        [([10], [2, 3, 5, 7]), ([2], []), ([0], []), ([30], [2, 3, 5, 7, 11, 13, 17, 19, 23, 29])],
        "def primes_below(limit):\n"
        "    return [n for n in range(2, limit) if all(n % d for d in range(2, isqrt(n) + 1))]",
        "def primes_below(limit: int) -> list[int]:",
    ),
)

TASKS: tuple[Task, ...] = PROGRAMS + FUNCTIONS
