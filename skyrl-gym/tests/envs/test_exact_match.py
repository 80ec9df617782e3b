from __future__ import annotations

import pytest

from skyrl_gym.envs.exact_match import is_match, normalize_answer, parse_targets


def test_normalize_answer() -> None:
    assert normalize_answer("The  Quick-brown, FOX & an owl") == "quickbrown fox owl"


@pytest.mark.parametrize(
    ("answer", "is_right"), [("A", True), ("a", True), (" a ", True), ("", False), ("the", False), ("?", False)]
)
def test_target_that_normalises_to_nothing(answer: str, is_right: bool) -> None:
    assert is_match(answer, ["A"]) == is_right


def test_any_target_matches() -> None:
    assert is_match("the Mount Fuji!", ["Etna", "mount fuji"])
    assert not is_match("the", ["Etna"])


def test_targets() -> None:
    assert (
        parse_targets("x")
        == parse_targets(["x"])
        == parse_targets({"target": "x"})
        == parse_targets({"target": ["x"]})
        == ["x"]
    )
    for wrong in ({}, {"target": []}, {"target": [3]}, 3, []):
        with pytest.raises(ValueError, match=r"must be \{'target': text or a list of texts\}"):
            parse_targets(wrong)
