import json
from typing import Any

import pytest
from gym_kit.texts import linear_time, long_text
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.envs.lcb.grading import Test as LcbTest
from skyrl_gym.envs.lcb.grading import Verdict, extract_code, grade, is_same_output, limits_per_test, parse_tests
from skyrl_gym.isolation.program import ProgramResult, Stdin


@pytest.mark.parametrize(("printed", "is_passed"), [("1 2\n3", True), ("1.0 2\n3\n", True), ("1\n2 3", False)])
def test_line_breaks_matter_and_number_notation_does_not(printed: str, is_passed: bool) -> None:
    result = ProgramResult("exit", status=0, stdout=printed)
    assert LcbTest(Stdin(""), "1 2\n3").is_passed(result) is is_passed


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


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        (" 1 \n2", "1\n2", True),
        ("1.0 2", "1 2.00", True),
        ("1e3", "1000", True),
        ("1 2", "1\n2", False),
        ("1", "1\n1", False),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("sNaN", "4", False),
        ("4", "sNaN", False),
        ("٤", "4", False),
        ("1_0", "10", False),
        ("", "", True),
        ("9" * 100_000, "8" * 100_000, False),
    ],
)
def test_outputs_are_compared_by_line_and_number(found: str, expected: str, same: bool) -> None:
    assert is_same_output(found, expected) is same


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
