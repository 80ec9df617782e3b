import pytest
from gym_kit.texts import linear_time, long_text
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.envs.gsm8k.grading import compute_score, extract_solution


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
