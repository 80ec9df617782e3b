from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.adapters.actions import (
    ActionError,
    extract_action,
    parse_calls,
    parse_json_array,
    parse_json_object,
    parse_whole_number,
)
from skyrl_gym.tools.calls import MAX_CALLS

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PROSE = st.text(st.characters(blacklist_characters="{}[]<>"))


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("left", "left"),
        ("  left\n", "left"),
        ("<think>right</think>left", "left"),
        ("right</think>left", "left"),
        ("<think>a</think>b<think>c</think>left", "left"),
        ("I go <action>left</action> now", "left"),
        ("<action>right</action> or rather <action>left</action>", "left"),
        ("<action><action>left</action></action>", "left"),
        ("<action>left", "left"),
        ("left</action>", "left</action>"),
        ("<think><action>right</action></think>left", "left"),
        ("le\0ft", "le\0ft"),
    ],
)
def test_extract_action(reply: str, text: str) -> None:
    assert extract_action(reply) == text


@pytest.mark.parametrize(
    "reply", ["", " \n", "<think>left", "left<action></action>", "<think>left</think>", "<action>"]
)
def test_empty_reply_has_no_action(reply: str) -> None:
    with pytest.raises(ActionError, match="no action"):
        extract_action(reply)


@pytest.mark.parametrize(
    ("text", "number"),
    [("3", 3), ("-3", -3), ("+3", 3), ("I take 3.", 3), ("3, 3 and 3", 3), ("(7)", 7), ("x2 4", 4), ("1.5 2", 2)],
)
def test_a_whole_number(text: str, number: int) -> None:
    assert parse_whole_number(text) == number


@pytest.mark.parametrize("text", ["", "three", "3 or 4", "3.5", "1e5", "a3", "٣", "²", "9" * 5000, "3_000"])
def test_no_whole_number(text: str) -> None:
    with pytest.raises(ActionError, match="whole number"):
        parse_whole_number(text)


@given(
    st.dictionaries(st.text(), VALUES), PROSE, PROSE, st.sampled_from(["{}", "```json\n{}\n```", "<action>{}</action>"])
)
def test_json_object_is_found_in_prose(value: dict[str, Any], before: str, after: str, frame: str) -> None:
    text = before + frame.replace("{}", json.dumps(value)) + after
    assert parse_json_object(text) == value


@given(st.lists(VALUES), PROSE, PROSE)
def test_json_array_is_found_in_prose(value: list[Any], before: str, after: str) -> None:
    assert parse_json_array(before + json.dumps(value) + after) == value


@given(st.text())
def test_any_text_is_parsed_or_raises_action_error(text: str) -> None:
    for read in (extract_action, parse_whole_number, parse_json_object, parse_json_array, parse_calls):
        try:
            read(text)
        except ActionError as error:
            assert str(error)  # noqa: PT017, any text may hold an action by chance


@pytest.mark.parametrize(
    "text",
    ["", "{", "}", "{x: 1}", "{'x': 1}", '{"x": NaN}', '{"x": 1e999}', '{"x": -Infinity}', '{"x": ' + "9" * 5000 + "}"],
)
def test_invalid_json_object(text: str) -> None:
    with pytest.raises(ActionError, match="must be a JSON object"):
        parse_json_object(text)


def test_last_outermost_object_counts() -> None:
    assert parse_json_object('{"x": 1} then {"y": {"z": 2}} and {broken') == {"y": {"z": 2}}


@pytest.mark.parametrize("depth", [65, 500, 980, 5000])
def test_deeply_nested_value_is_refused(depth: int) -> None:
    with pytest.raises(ActionError, match="must be a JSON object, but it is nested too deeply"):
        parse_json_object('{"x":' * depth + "1" + "}" * depth)
    with pytest.raises(ActionError, match="must be a JSON array, but it is nested too deeply"):
        parse_json_array("[" * depth + "]" * depth)


def test_calls_are_limited() -> None:
    assert len(parse_calls(CALL * MAX_CALLS)) == MAX_CALLS
    with pytest.raises(ActionError, match=f"more than {MAX_CALLS} tool calls"):
        parse_calls(CALL * (MAX_CALLS + 1))


def test_malformed_call_raises() -> None:
    with pytest.raises(ActionError, match="not valid JSON"):
        parse_calls(CALL + "<tool_call>{</tool_call>")


def test_braces_in_prose_do_not_hide_an_action() -> None:
    assert parse_json_object("the set {a, b} and {" + ' so {"x": 1}') == {"x": 1}


@pytest.mark.parametrize(
    "text",
    [
        "{" * 10**6,
        CALL * 18_000,
        '{"a":' * 200_000,
        '{"' + "a" * 10**6,
        "[" * 10**6,
        '{"a": 1' * 150_000,
        "<action>" * 125_000,
    ],
)
@pytest.mark.parametrize("read", [extract_action, parse_whole_number, parse_json_object, parse_json_array, parse_calls])
def test_parsing_is_linear(text: str, read: Any) -> None:
    started = time.process_time()
    try:
        read(text)
    except ActionError as error:
        assert len(str(error)) < 500  # noqa: PT017, some of these are something else's action
    assert time.process_time() - started < 5
