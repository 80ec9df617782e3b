from __future__ import annotations

import pytest

from skyrl_gym.envs.lcb.grading import Test as LcbTest
from skyrl_gym.envs.lcb.grading import Verdict, grade, limits_per_test
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
