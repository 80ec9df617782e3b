from __future__ import annotations

import pytest

from skyrl_gym.envs.lcb.grading import Test as LcbTest
from skyrl_gym.envs.lcb.grading import Verdict, grade, limits_of
from skyrl_gym.isolation.program import Outcome, Stdin


@pytest.mark.parametrize(("printed", "is_passed"), [("1 2\n3", True), ("1.0 2\n3\n", True), ("1\n2 3", False)])
def test_lines_count_and_the_notation_of_numbers_does_not(printed: str, is_passed: bool) -> None:
    outcome = Outcome("exit", status=0, stdout=printed)
    assert LcbTest(Stdin(""), "1 2\n3").is_passed(outcome) is is_passed


def test_waiting_counts_towards_the_time_of_all_tests() -> None:
    """A quarter of it, since a busy machine makes programs wait as well."""
    tests = [LcbTest(Stdin(""), "") for _ in range(3)]
    verdict = grade("import time; time.sleep(0.8)", tests, limits_of(5.0, 1 << 29), total_seconds=0.1)
    assert verdict == Verdict(n_passed=1, n_tests=3, failure="time")
