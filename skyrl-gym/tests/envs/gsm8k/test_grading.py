from __future__ import annotations

import pytest
from gym_kit.texts import linear_time, long_text
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym import maths
from skyrl_gym.envs.gsm8k.grading import GRADERS, compute_score, extract_solution
from skyrl_gym.maths import Grade


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("#### 1,234.50", "1234.50"),
        ("#### 42.", "42."),
        ("#### 1\n#### 2", "1"),
        ("#### 12 apples", "12"),
        ("#### x\n#### 3", "3"),
        ("#### .", "."),
        ("#### 4٢", "4٢"),
        ("####", None),
        ("#### ", None),
        ("\x00\ud800#### 42", "42"),
    ],
)
def test_strict_reads_the_first_number_after_four_hashes(reply: str, answer: str | None) -> None:
    assert extract_solution(reply, "strict") == answer
    assert extract_solution(reply) == answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("It is $1,234.50, I think...", "1234.50"),
        ("5 - 7 = -2!", "-2"),
        ("#### 41 or 42 or .5", ".5"),
        ("42 , . ... -", "42"),
        ("", None),
    ],
)
def test_flexible_reads_the_last_number(reply: str, answer: str | None) -> None:
    assert extract_solution(reply, "flexible") == answer


@given(
    st.integers().map(str),
    st.text(alphabet="abc\n$ٱ", max_size=20),
    st.from_regex(r"([ \n$%*][abc\n$ٱ]*)?", fullmatch=True),
)
def test_a_number_in_the_format_is_found_in_any_text(number: str, before: str, after: str) -> None:
    assert extract_solution(f"{before}#### {number}{after}", "strict") == number
    assert extract_solution(f"{before} {number} {after}", "flexible") == number


@pytest.mark.parametrize("unit", ["#", "#### ", "1", "-", "1,", ".", "- ", "#### -"])
def test_parsing_is_linear(unit: str) -> None:
    with linear_time():
        extract_solution(long_text(unit), "strict")
        extract_solution(long_text(unit), "flexible")


def test_compute_score() -> None:
    assert compute_score("#### 42", "42") == 1.0
    assert compute_score("#### 41", "42") == 0.0
    assert compute_score("#### 41", "42", format_score=0.1) == 0.1
    assert compute_score("41", "42", format_score=0.1) == 0.0
    assert compute_score("41", "42", "flexible", format_score=0.1, score=2.0) == 0.1
    assert compute_score("42", "42", "flexible", score=2.0) == 2.0


def test_graders() -> None:
    assert GRADERS["strict"]("#### 41 then 42", "42") == Grade("41", False)
    assert GRADERS["flexible"]("#### 41 then 42", "42") == Grade("42", True)
    assert GRADERS["flexible"]("", "42") == Grade(None, False)
    assert GRADERS["math_verify"] is maths.grade
