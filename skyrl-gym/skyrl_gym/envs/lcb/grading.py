"""Run a program on the tests of its task.

Source of the format of tests and of the comparison: LiveCodeBench (Jain et al., 2024, arXiv:2403.07974).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from skyrl_gym.isolation.program import Call, Level, Limits, Outcome, Stdin, run_program

FENCE = "```"
OPENING = re.compile(r"```[^\n`]*\n")
MOST_NUMBER_CHARS = 400
PATIENCE = 4.0  # seconds by the clock for a second of computing

PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys, typing
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
inf = float("inf")
"""
"""What solutions take for granted where tasks of this kind come from."""


@dataclass(frozen=True, slots=True)
class Test:
    """One test: how to run the program, and what must come out."""

    run: Stdin | Call
    output: Any  # text for a `Stdin`, a value for a `Call`

    def is_passed(self, outcome: Outcome) -> bool:
        """Whether the program did what it should."""
        if not outcome.is_success:
            return False
        if isinstance(self.run, Stdin):
            return is_same_output(outcome.stdout, self.output)
        try:
            return bool(outcome.value == self.output)
        except (ValueError, RecursionError):
            return False


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many tests a program passed before it failed one, and how it failed."""

    n_passed: int
    n_tests: int
    failure: str | None = None  # "wrong", "error", or the limit that it met

    @property
    def is_correct(self) -> bool:
        """Whether it passed them all."""
        return self.n_passed == self.n_tests


def extract_code(reply: str) -> str | None:
    """The last fenced block of a reply; None without one. A block that is still open is none."""
    code, position = None, 0
    while opening := OPENING.search(reply, position):
        end = reply.find(FENCE, opening.end())
        if end < 0:
            break
        code, position = reply[opening.end() : end], end + len(FENCE)
    return code


def read_tests(ground_truth: Any) -> list[Test]:
    """The tests of a task: a list, or its JSON, of `{"input", "output", "testtype", "metadata": {"func_name"}}`.

    Raises:
        ValueError: they cannot be read, or there are none.
    """
    try:
        told = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        tests = [_test(one) for one in told]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the tests cannot be read ({error!r}): {str(ground_truth)[:200]}") from error
    if not tests:
        raise ValueError("the task has no tests: ground_truth is an empty list")
    return tests


def limits_of(cpu_seconds: float, memory_bytes: int) -> Limits:
    """Of one test. What counts is what a program computes, so that a verdict does not hang on what else is running; one
    that sleeps is ended by the clock.
    """
    return Limits(seconds=PATIENCE * cpu_seconds, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)


def grade(
    code: str, tests: Sequence[Test], limits: Limits, total_seconds: float, level: Level | None = None
) -> Verdict:
    """Run the program on the tests, up to the first that it fails; it may compute `total_seconds` for all of them."""
    n_passed, seconds = 0, 0.0
    with closing(run_program(code, [test.run for test in tests], limits, level, prelude=PRELUDE)) as outcomes:
        for test, outcome in zip(tests, outcomes, strict=True):
            if not test.is_passed(outcome):
                return Verdict(n_passed, len(tests), _failure(outcome))
            n_passed += 1
            seconds += max(outcome.cpu_seconds, outcome.seconds / PATIENCE)
            if seconds > total_seconds and n_passed < len(tests):
                return Verdict(n_passed, len(tests), "time")
    return Verdict(n_passed, len(tests))


def is_same_output(found: str, expected: str) -> bool:
    """Whether two outputs are the same line by line, but for space around a line, and for how numbers are written."""
    lines, expected_lines = found.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(expected_lines) and all(
        line.strip() == other.strip() or _are_same_numbers(line.split(), other.split())
        for line, other in zip(lines, expected_lines, strict=True)
    )


def _are_same_numbers(words: Sequence[str], others: Sequence[str]) -> bool:
    return len(words) == len(others) and all(
        word == other or ((number := _number(word)) is not None and number == _number(other))
        for word, other in zip(words, others, strict=True)
    )


def _number(word: str) -> Decimal | None:
    if not word.isascii() or len(word) > MOST_NUMBER_CHARS or "_" in word:
        return None
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _test(told: Any) -> Test:
    if not isinstance(told, Mapping):
        raise TypeError(f"a test is an object, not {told!r}")
    kind = told.get("testtype", "stdin")
    if kind == "stdin":
        return Test(Stdin(str(told["input"])), str(told["output"]))
    if kind != "functional":
        raise ValueError(f"testtype={kind!r} is neither 'stdin' nor 'functional'")
    metadata = told.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    args = [json.loads(line) for line in str(told["input"]).split("\n") if line.strip()]
    return Test(Call(str(metadata["func_name"]), args), json.loads(told["output"]))


def _failure(outcome: Outcome) -> str:
    if outcome.is_success:
        return "wrong"
    return "error" if outcome.end == "exit" else outcome.end
