"""Grading of programs on their tests.

Source of the test format and of the comparison: LiveCodeBench (Jain et al., 2024, arXiv:2403.07974).
"""

import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from textwrap import dedent
from typing import Any

from skyrl_gym.isolation.program import FunctionCall, Level, ProgramLimits, ProgramResult, Stdin, run_program
from skyrl_gym.tools.calls import strip_thoughts

FENCE = "```"
OPENING = re.compile(r"(?:^([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?))?(?<!`)(`{3,}+)([^\n`]*)\n", re.MULTILINE)
_PYTHON = re.compile(r"(?!pycon|pytb)py|$")  # sessions and tracebacks are no programs
_PADDED = re.compile(r"[+-]?0\d")
MAX_NUMBER_CHARS = 400
OUTPUT_TOLERANCE, VALUE_TOLERANCE = 1e-6, 1e-5
"""Absolute or relative error that judges of contests accept in printed decimals, and LeetCode in returned floats."""
WALL_TIME_FACTOR = 4.0  # seconds of wall time allowed per second of CPU time

PRELUDE = """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from json import *
from typing import *
from builtins import *
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, random, re
import statistics, string, sys, typing
sys.setrecursionlimit(50000)
sys.set_int_max_str_digits(50000)
"""
"""Imports and limits that solutions on contest sites rely on, as SkyRL and LiveCodeBench provide them.

The order matters: builtins come after modules with equal names (`math.pow`, `operator.abs`), and modules after their
functions.
"""
LIBRARIES = {"np": "numpy", "pd": "pandas"}
"""Libraries that a solution may use under these names without importing them. Slow, so imported on demand."""
OUTPUT_BYTES, OUTPUT_FACTOR = 1 << 20, 4  # a program may print more than expected: spaces, digits, escapes


@dataclass(frozen=True, slots=True)
class Test:
    """One test: how to run the program, and the expected output."""

    run: Stdin | FunctionCall
    output: Any  # text for a `Stdin`, a value for a `FunctionCall`

    def is_passed(self, result: ProgramResult) -> bool:
        """Return True if the program produced the expected output."""
        if not result.is_success:
            return False
        if isinstance(self.run, Stdin):
            return is_same_output(result.stdout, self.output)
        try:
            return is_same_value(result.value, self.output)
        except (ValueError, RecursionError):
            return False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number of tests passed before the first failure, and the kind of failure."""

    n_passed: int
    n_tests: int
    failure: str | None = None  # "none" without a program, "wrong", "error", or the limit that it hit

    @property
    def is_correct(self) -> bool:
        """True if the program passed all tests."""
        return self.n_passed == self.n_tests


def extract_code(reply: str) -> str | None:
    r"""Return the last closed fenced block of a reply, or None if there is none. Thoughts are ignored.

    As in CommonMark, the closing fence stands alone on a line, is at least as long as the opening one, and is at most
    three spaces deeper, so fences in a docstring are part of the program. A fence at the end of a line without other
    backticks also closes the block. A block in a list is dedented. A block without a language, such as an example of
    the output, counts only if no block is labeled as Python, and one of another language only if there is no other.

    >>> extract_code("Here it is:\n```python\nprint(42)\n```\nIt prints 42.")
    'print(42)\n'
    """
    reply = strip_thoughts(reply)
    code, code_rank, position = None, 0, 0
    while opening := OPENING.search(reply, position):
        indentation, fence = opening[1] or "", opening[2]
        end = re.compile(
            rf"^(?:[ \t]{{0,{len(indentation) + 3}}}|([^`\n]*[^\s`])){fence}`*[ \t\r]*$", re.MULTILINE
        ).search(reply, opening.end())
        if end is None:
            break
        block, position = reply[opening.end() : end.start()] + (end[1] or ""), end.end()
        block = dedent(block) if indentation else block
        language = opening[3].strip().lower()
        rank = 0 if not _PYTHON.match(language) else 2 if language else 1
        if rank >= code_rank:
            code, code_rank = block, rank
    return code


def parse_tests(ground_truth: Any) -> list[Test]:
    """Parse the tests of a task: a list, or its JSON, of `{"input", "output", "testtype", "metadata": {"func_name"}}`.

    Raises:
        ValueError: the tests cannot be parsed, or there are none.

    >>> parse_tests([{"input": "3 4", "output": "7", "testtype": "stdin"}])
    [Test(run=Stdin(text='3 4', ignores_exit_status=True), output='7')]
    """
    try:
        records = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        tests = [_parse_test(record) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the tests cannot be parsed ({error!r}): {str(ground_truth)[:200]}") from error
    if not tests:
        raise ValueError("the task has no tests: ground_truth is an empty list")
    return tests


def limits_per_test(cpu_seconds: float, memory_bytes: int, tests: Sequence[Test]) -> ProgramLimits:
    """Return the limits for a single test.

    The limit that matters is CPU time, so a verdict does not depend on the machine's load. The wall time limit only
    ends programs that sleep. The output limit is a multiple of the longest expected output.
    """
    max_output = max(len(test.output if isinstance(test.run, Stdin) else json.dumps(test.output)) for test in tests)
    return ProgramLimits(
        seconds=WALL_TIME_FACTOR * cpu_seconds,
        cpu_seconds=cpu_seconds,
        memory_bytes=memory_bytes,
        output_bytes=OUTPUT_BYTES + OUTPUT_FACTOR * max_output,
    )


def grade(
    code: str, tests: Sequence[Test], limits: ProgramLimits, total_seconds: float, level: Level | None = None
) -> Verdict:
    """Run a program on the tests until one fails, with `total_seconds` of CPU time for all of them."""
    n_passed, seconds = 0, 0.0
    prelude = PRELUDE + "".join(
        f"import {module} as {name}\n" for name, module in LIBRARIES.items() if _uses_library(code, name, module)
    )
    with closing(run_program(code, [test.run for test in tests], limits, level, prelude=prelude)) as results:
        for test, result in zip(tests, results, strict=True):
            if not test.is_passed(result):
                failure = "error" if result.end == "exit" else result.end
                return Verdict(n_passed, len(tests), "wrong" if result.is_success else failure)
            n_passed += 1
            seconds += max(result.cpu_seconds, result.seconds / WALL_TIME_FACTOR)
            if seconds > total_seconds and n_passed < len(tests):
                return Verdict(n_passed, len(tests), "time")
    return Verdict(n_passed, len(tests))


def _uses_library(code: str, name: str, module: str) -> bool:
    return re.search(rf"\b{name}\s*\.", code) is not None and importlib.util.find_spec(module) is not None


def is_same_output(actual: str, expected: str) -> bool:
    r"""Return True if two outputs are equal line by line, ignoring space around lines and notation of numbers.

    An expected decimal may be off by `OUTPUT_TOLERANCE`, but not an integer. A number with leading zeros is text.

    >>> is_same_output("1.50  \n", "1.5")
    True
    >>> is_same_output("0.333333", "0.3333333333")
    True
    >>> is_same_output("1 2", "1\n2")
    False
    """
    lines, expected_lines = actual.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(expected_lines) and all(
        line.strip() == other.strip() or _are_same_numbers(line.split(), other.split())
        for line, other in zip(lines, expected_lines, strict=True)
    )


def _are_same_numbers(words: Sequence[str], others: Sequence[str]) -> bool:
    return len(words) == len(others) and all(
        word == other or _is_close(_number(word), _number(other), is_exact=other.lstrip("+-").isdigit())
        for word, other in zip(words, others, strict=True)
    )


def _is_close(number: Decimal | None, other: Decimal | None, *, is_exact: bool) -> bool:
    if number is None or other is None or number == other or is_exact:
        return number is not None and number == other
    values = float(number), float(other)
    return all(map(math.isfinite, values)) and math.isclose(*values, rel_tol=OUTPUT_TOLERANCE, abs_tol=OUTPUT_TOLERANCE)


def is_same_value(actual: Any, expected: Any) -> bool:
    """Return True if a returned value equals the expected one. Expected floats may be off by `VALUE_TOLERANCE`.

    >>> is_same_value([0.1 + 0.2], [0.3])
    True
    """
    if isinstance(expected, list) and isinstance(actual, list):
        return len(actual) == len(expected) and all(map(is_same_value, actual, expected))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(is_same_value(actual[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(actual, int | float):
        return math.isclose(actual, expected, rel_tol=VALUE_TOLERANCE, abs_tol=VALUE_TOLERANCE)
    return bool(actual == expected)


def _number(word: str) -> Decimal | None:
    if not word.isascii() or len(word) > MAX_NUMBER_CHARS or "_" in word or _PADDED.match(word):
        return None
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _parse_test(record: Any) -> Test:
    if not isinstance(record, Mapping):
        raise TypeError(f"a test must be an object, not {record!r}")
    kind = record.get("testtype", "stdin")
    if kind == "stdin":
        return Test(Stdin(str(record["input"]), ignores_exit_status=True), str(record["output"]))
    if kind != "functional":
        raise ValueError(f"testtype={kind!r} is neither 'stdin' nor 'functional'")
    metadata = record.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    args = [json.loads(line) for line in str(record["input"]).split("\n") if line.strip()]
    return Test(FunctionCall(str(metadata["func_name"]), args), json.loads(record["output"]))
