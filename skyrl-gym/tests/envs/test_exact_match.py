import pytest
from gym_kit.texts import linear_time, long_text

from skyrl_gym.envs.exact_match import normalize_answer, parse_targets


def test_answers_and_targets_are_normalized() -> None:
    assert normalize_answer("The  Quick-brown, FOX & an owl") == "quickbrown fox owl"
    for targets in ("x", ["x"], {"target": "x"}, {"target": ["x"]}):
        assert parse_targets(targets) == ["x"]
    for wrong in ({}, {"target": []}, {"target": [3]}, 3, []):
        with pytest.raises(ValueError, match=r"must be \{'target': a string or a list of strings\}"):
            parse_targets(wrong)


def test_normalization_of_combining_marks_is_linear() -> None:
    with linear_time():
        normalize_answer("e" + long_text("\u0315\u0300"))
