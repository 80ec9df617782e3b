from datetime import date
from typing import Any

import numpy as np
import pytest

from skyrl_gym.adapters.observations import append_observation, format_observation


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("a text", "a text"),
        (16, "16"),
        (np.int64(16), "16"),
        (True, "true"),
        (None, "null"),
        (0.1 + 0.2, "0.3"),
        (np.float32(0.1), "0.1"),
        (np.array([0.1, -2], dtype=np.float32), "[0.1, -2]"),
        (np.array([[0, 1], [1, 0]]), "0 1\n1 0"),
        ([["X", "."], [".", "O"]], "X .\n. O"),
        ((20, 7, 0), "[20, 7, 0]"),
        ([["a"], ["b", "c"]], '[["a"], ["b", "c"]]'),
        ([], "[]"),
        ({}, ""),
        ({"prompt": "Guess.", "messages": [], "error": None}, "Guess."),
        ({"board": [[0, 1], [2, 3]], "legal": [0, 2]}, "board:\n0 1\n2 3\nlegal: [0, 2]"),
        ({"player": {"hp": 3, "name": "Ann"}, "at": np.array([1, 2])}, "player:\nhp: 3\nname: Ann\nat: [1, 2]"),
        ([{"role": "user", "n": np.int64(2)}], '[{"role": "user", "n": 2}]'),
        ({"at": 1 + 2j}, "at: (1+2j)"),
        ([1, {2}], '[1, "{2}"]'),
        (date(2024, 5, 6), "2024-05-06"),
    ],
)
def test_observations_are_readable(observation: Any, text: str) -> None:
    assert format_observation(observation) == text


@pytest.mark.parametrize(
    ("observation", "template", "text"),
    [
        ({"board": "XO", "n": 2}, "board", "XO"),
        ({"board": "XO", "n": 2}, "{n}: {board}", "2: XO"),
        ((20, 7, 0), "Sum {0}, dealer {1}", "Sum 20, dealer 7"),
        (np.array([0.5, 1.5]), "at {0}", "at 0.5"),
        (16, "Cell {observation}", "Cell 16"),
        ({"board": "{n}", "n": 2}, "{board}", "{n}"),
    ],
)
def test_templates(observation: Any, template: str, text: str) -> None:
    assert format_observation(observation, template) == text


@pytest.mark.parametrize(("observation", "fields"), [({"n": 2}, "has n"), ({}, "no fields"), ((1, 2), "has 0, 1")])
def test_template_with_a_missing_field_raises(observation: Any, fields: str) -> None:
    with pytest.raises(ValueError, match=f"has the field 'board'.*{fields}"):
        format_observation(observation, "{board}")


def test_first_observation_is_appended_to_the_last_user_message() -> None:
    system, user = {"role": "system", "content": "Play."}, {"role": "user", "content": "Begin."}
    assert append_observation([system, user], "X.") == [system, {"role": "user", "content": "Begin.\n\nX."}]
    assert append_observation([system], "X.") == [system, {"role": "user", "content": "X."}]
    for empty in ("", None):
        message = {"role": "user", "content": empty, "name": "Ann"}
        assert append_observation([message], "X.") == [{"role": "user", "content": "X.", "name": "Ann"}]  # type: ignore[list-item]
    assert append_observation([user], "") == [user]
    parts = {"role": "user", "content": [{"type": "text", "text": "Begin."}]}
    (joined,) = append_observation([parts], "X.")
    assert joined["content"] == [*parts["content"], {"type": "text", "text": "X."}]  # type: ignore[misc]
    assert append_observation([], "X.") == [{"role": "user", "content": "X."}]
    assert user == {"role": "user", "content": "Begin."}
