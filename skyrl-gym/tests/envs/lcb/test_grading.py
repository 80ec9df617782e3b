import json
from typing import Any

import pytest
from gym_kit.texts import linear_time, long_text
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.envs.lcb.grading import Test as LcbTest
from skyrl_gym.envs.lcb.grading import (
    Verdict,
    extract_code,
    grade,
    is_same_output,
    is_same_value,
    limits_per_test,
    parse_tests,
)
from skyrl_gym.isolation.program import Stdin


def test_waiting_counts_towards_the_total_time() -> None:
    """A quarter of the waiting counts, since a busy machine makes programs wait too."""
    tests = [LcbTest(Stdin(""), "") for _ in range(3)]
    verdict = grade("import time; time.sleep(0.8)", tests, limits_per_test(5.0, 1 << 29, tests), total_seconds=0.1)
    assert verdict == Verdict(n_passed=1, n_tests=3, failure="time")


@given(st.lists(st.sampled_from(["```", "\n", "x", "`", "python"])).map("".join) | st.text())
def test_extracted_code_is_part_of_the_reply(reply: str) -> None:
    code = extract_code(reply)
    assert code is None or all(line.strip() in reply for line in code.split("\n"))  # a block may be indented


@pytest.mark.parametrize("unit", ["```", "```\n", "`", "```x", "\n```python"])
def test_extraction_is_linear(unit: str) -> None:
    with linear_time():
        extract_code(long_text(unit))


def test_long_numbers_are_compared_as_text() -> None:
    assert not is_same_output("9" * 100_000, "8" * 100_000)


@pytest.mark.parametrize(
    "ground_truth",
    [
        *("", "[", "{}", "[]", '[{"input": "x"}]', '[{"input": "", "output": "", "testtype": "gui"}]', [3]),
        json.dumps([{"input": "[]", "output": "[]", "testtype": "functional", "metadata": None}]),
    ],
)
def test_invalid_tests_raise(ground_truth: Any) -> None:
    with pytest.raises(ValueError, match="tests"):
        parse_tests(ground_truth)


@pytest.mark.parametrize(
    ("actual", "expected", "is_same"),
    [
        (0.1 + 0.2, 0.3, True),
        ([[1 / 3], 2], [[0.33333], 2], True),
        ({"a": 0.66667}, {"a": 2 / 3}, True),
        (2, 2.0, True),
        ([0.3333], [0.33333], False),
        ([0.3, 0.3], [0.3], False),
        ({"b": 0.3}, {"a": 0.3}, False),
        (1.000001, 1, False),
        ("0.30", 0.3, False),
        (float("nan"), 0.3, False),
    ],
)
def test_returned_floats_may_be_rounded(actual: Any, expected: Any, is_same: bool) -> None:
    assert is_same_value(actual, expected) == is_same
