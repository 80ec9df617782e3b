from __future__ import annotations

import pytest

from skyrl_gym.exact_match import is_match, normalize_answer, targets_of


def test_what_is_left_of_an_answer() -> None:
    assert normalize_answer("The  Quick-brown, FOX & an owl") == "quickbrown fox owl"


@pytest.mark.parametrize(
    ("answer", "is_right"), [("A", True), ("a", True), (" a ", True), ("", False), ("the", False), ("?", False)]
)
def test_a_target_of_which_nothing_would_be_left(answer: str, is_right: bool) -> None:
    assert is_match(answer, ["A"]) == is_right


def test_one_of_the_targets_will_do() -> None:
    assert is_match("the Mount Fuji!", ["Etna", "mount fuji"])
    assert not is_match("the", ["Etna"])


def test_targets() -> None:
    assert targets_of("x") == targets_of(["x"]) == targets_of({"target": "x"}) == targets_of({"target": ["x"]}) == ["x"]
    for wrong in ({}, {"target": []}, {"target": [3]}, 3, []):
        with pytest.raises(ValueError, match=r"must be \{'target': text or a list of texts\}"):
            targets_of(wrong)
