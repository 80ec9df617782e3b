from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.tools.strict_json import MAX_DEPTH, BadJSON, TooDeep, read_json, read_json_at

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@given(VALUES, st.sampled_from(["", " ", "\n\t"]))
def test_what_is_written_is_read(value: Any, space: str) -> None:
    assert read_json(space + json.dumps(value) + space) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it breaks at line 1, column 1: Expecting value"),
        ("[1,\n x]", "it breaks at line 2, column 2: Expecting value"),
        ("{} {}", "it breaks at line 1, column 4: Extra data"),
        ("NaN", "a number in it cannot be read"),
        ("[-Infinity]", "a number in it cannot be read"),
        ("1e999", "a number in it cannot be read"),
        ("9" * 5000, "a number in it cannot be read"),
        (nested(MAX_DEPTH + 1), "it is nested too deeply"),
        (nested(100_000), "it is nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "it is nested too deeply"),
    ],
)
def test_what_is_no_json_is_explained(text: str, message: str) -> None:
    with pytest.raises(BadJSON) as error:
        read_json(text)
    assert str(error.value) == message


def test_a_value_within_a_text() -> None:
    text = "see " + nested(MAX_DEPTH) + " there"
    value, end = read_json_at(text, 4)
    assert (json.dumps(value), text[end:]) == (nested(MAX_DEPTH), " there")
    with pytest.raises(TooDeep):
        read_json_at(nested(MAX_DEPTH + 1), 0)
    with pytest.raises(BadJSON, match="column 1: Expecting value"):
        read_json_at("see", 0)


@pytest.mark.parametrize("text", [nested(500_000), "[" + "0," * 500_000 + "0]", '{"a":' * 200_000, "[" * 10**6])
def test_a_megabyte_takes_no_time(text: str) -> None:
    started = time.process_time()
    with suppress(BadJSON):
        read_json(text)
    assert time.process_time() - started < 2
