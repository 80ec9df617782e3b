import pytest

from skyrl_gym.envs.exact_match import is_match, normalize_answer, parse_targets


@pytest.mark.parametrize(
    ("answer", "targets", "is_right"),
    [
        *((answer, ["A"], True) for answer in ("A", "a", " a ")),  # a target that is an article
        *((answer, ["A"], False) for answer in ("", "the", "?")),
        ("the Mount Fuji!", ["Etna", "mount fuji"], True),
        ("the", ["Etna"], False),
    ],
)
def test_any_target_matches(answer: str, targets: list[str], is_right: bool) -> None:
    assert is_match(answer, targets) == is_right


def test_answers_and_targets_are_normalized() -> None:
    assert normalize_answer("The  Quick-brown, FOX & an owl") == "quickbrown fox owl"
    for targets in ("x", ["x"], {"target": "x"}, {"target": ["x"]}):
        assert parse_targets(targets) == ["x"]
    for wrong in ({}, {"target": []}, {"target": [3]}, 3, []):
        with pytest.raises(ValueError, match=r"must be \{'target': a string or a list of strings\}"):
            parse_targets(wrong)
