import pytest
from gym_kit.texts import linear_time, long_text
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.envs.aime.grading import GRADERS, compute_score, normalize_answer
from skyrl_gym.maths import Grade


@pytest.mark.parametrize(
    ("reply", "truth", "pred", "is_correct"),
    [
        ("Answer: 42\nanswer: 41", "42", "41", False),
        ("Answer: 42", "x = 42 dollars", "42", True),
        ("Answer: 42" + " " * 300, "42", "[INVALID]", False),
        ("42" * 1000 + " Answer: 42", "42", "42", True),
        ("", "[INVALID]", "[INVALID]", False),
        ("Answer: dollars", "units", "", False),
    ],
)
def test_minerva_reads_the_last_answer(reply: str, truth: str, pred: str, is_correct: bool) -> None:
    assert GRADERS["minerva"](reply, truth) == Grade(pred, is_correct)
    assert compute_score(reply, truth) == {"score": 1.0 if is_correct else -1.0, "acc": is_correct, "pred": pred}


@pytest.mark.parametrize(
    ("reply", "truth", "pred", "is_correct"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}", True),
        (r"\boxed{ 42}", "42", " 42", False),
        (r"\boxed{42}" + "." * 100, "42", None, False),
        ("", "", None, False),
    ],
)
def test_strict_box_reads_the_last_box(reply: str, truth: str, pred: str | None, is_correct: bool) -> None:
    assert GRADERS["strict_box"](reply, truth) == Grade(pred, is_correct)
    score = {"score": 1.0 if is_correct else -1.0, "acc": is_correct, "pred": pred}
    assert compute_score(reply, truth, strict_box_verify=True) == score


@given(st.text())
def test_any_reply_is_scored(reply: str) -> None:
    for is_strict in (False, True):
        assert compute_score("Answer: " + reply, "no such answer", is_strict)["score"] == -1
    normal = normalize_answer(reply)
    assert "$" not in normal
    assert normal == normal.strip()


@pytest.mark.parametrize("unit", ["Answer:", "Answer: $", "$", r"\boxed{", r"\text{", "frac", "=", "\n", "a "])
def test_parsing_is_linear(unit: str) -> None:
    with linear_time():
        compute_score(long_text(unit), "42")
        compute_score(long_text(unit), "42", strict_box_verify=True)


def test_the_truth_may_be_a_number() -> None:
    assert compute_score("Answer: 42", 42)["acc"]  # type: ignore[arg-type]
