from __future__ import annotations

import pytest
from gym_kit.texts import linear_time, long_text
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym import maths
from skyrl_gym.envs.aime.grading import GRADERS, compute_score, normalize_answer, to_reward
from skyrl_gym.maths import Grade


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        *((answer, "42") for answer in ("42", " 42 ", "x = 42", "a = b = 42", "$42$", "so $x = 42$.", r"\boxed{42}")),
        *((answer, "42") for answer in ("the value $42$ is it", "42 dollars", "42 square cm", r"\$42")),
        *((answer, "7") for answer in (r"\text{\textbf{7}}", r"\mbox{7}")),
        *((answer, "90") for answer in (r"90^\circ", r"90^{\circ}")),
        *((answer, r"\frac{1}{2}") for answer in (r"\boxed{\frac{1}{2}}", r"\frac12", r"\frac{1}{2}")),
        *((answer, r"\sqrt{2}") for answer in (r"\sqrt2", r"\sqrt{2}")),
        *((answer, answer) for answer in ("1,2", "(1,2)", "²", "1,²", "٤,٢", "")),
        ("1,234,567", "1234567"),
        ("1,000.5", "1000.5"),
        ("10{,}000", "10000"),
        (r"\frac123", r"\frac{1}{2}3"),
        (r"\text{blue}", "blue"),
        (r"\overline{AB}", "AB"),
        (r"5\text{ cm}^2", "5"),
        (r"7^{\mathrm{th}}", "7^{}"),
        (r"3 \text{and} 4", "3,4"),
        ("an apple", "apple"),
        ("units", ""),
    ],
)
def test_normalize_answer(answer: str, normal: str) -> None:
    assert normalize_answer(answer) == normal


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


def test_defaults_and_other_types() -> None:
    assert GRADERS["math_verify"] is maths.grade
    assert [to_reward(Grade("42", is_correct)) for is_correct in (True, False)] == [1.0, -1.0]
    assert compute_score("Answer: 42", 42)["acc"]  # type: ignore[arg-type]
