"""Text and facts of environments become safe for tokenizers, files and trackers."""

import json
import math
from typing import Any

from gym_kit.messages import user
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.core import EnvStepOutput
from skyrl_gym.runtime.text import MAX_DEPTH, clean_strings, clean_text, describe_error, to_facts
from skyrl_gym.runtime.validation import reward_components, validate_prompt, validate_step_output

HALF = "\ud83d"


@given(st.text(st.characters(), max_size=20))
def test_any_text_can_be_encoded_and_clean_text_is_unchanged(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert clean_text(cleaned) == cleaned
    if not any(0xD800 <= ord(c) < 0xE000 for c in text):
        assert cleaned == text


def test_halves_of_a_pair_are_joined_and_strings_are_cleaned_at_every_depth() -> None:
    assert clean_text("a\ud83d\ude00b\ude00") == "a😀b?"
    assert clean_strings({HALF: [{"a": (HALF, 1, None)}]}) == {"?": [{"a": ("?", 1, None)}]}


class Odd:
    """An object that answers nothing."""

    def __str__(self) -> str:
        raise KeyError

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


def test_every_value_has_facts() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    values = {HALF: HALF, 1: 2, ("a",): {3}, "odd": Odd(), "huge": 10**5000, "cyclic": cyclic, "nan": math.nan}
    facts = to_facts(values)
    json.dumps(facts, ensure_ascii=False).encode()
    assert (facts["?"], facts["1"], facts["huge"], facts["odd"]) == ("?", 2, math.inf, "<unreadable Odd>")
    for _ in range(MAX_DEPTH - 1):
        (facts["cyclic"],) = facts["cyclic"]
    assert facts["cyclic"] == "<list, nested too deeply>"


def test_an_error_without_a_text_is_described() -> None:
    assert describe_error(ValueError(HALF)) == "ValueError: ?"
    assert describe_error(ValueError(Odd())) == "ValueError: its text cannot be read: str() raised KeyError"
    assert len(describe_error(ValueError("x" * 10**6))) < 5000


def test_text_and_names_of_an_environment_are_cleaned() -> None:
    (message,) = user(HALF)
    assert validate_prompt(([message], {})) == user("?")
    output: EnvStepOutput[Any] = {
        "observations": [message],
        "reward": 1.0,
        "done": False,
        "metadata": {"modified_chat_history": [message], "reward_components": {HALF: 1.0}, "own": HALF},
    }
    cleaned = validate_step_output(output)
    assert cleaned["observations"] == user("?")
    assert cleaned["metadata"] == {
        "modified_chat_history": user("?"),
        "reward_components": {"?": 1.0},
        "own": HALF,  # training does not read it
    }
    output = {"observations": [], "reward": 1.0, "done": True, "metadata": {"reward_components": {1: 0.5, "b": 0.5}}}
    assert reward_components(output) == {"1": 0.5, "b": 0.5}
