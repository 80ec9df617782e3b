import json
from contextlib import suppress
from typing import Any

import pytest
from gym_kit.messages import call
from gym_kit.texts import JSON_VALUES, linear_time, long_text
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_gym.adapters.actions import (
    MAX_FAILURES,
    ActionError,
    extract_action,
    parse_calls,
    parse_json_array,
    parse_json_object,
    parse_whole_number,
)

CALL = call("add", a=1)
PROSE = st.text(st.characters(blacklist_characters="{}[]<>"))


LEFT = [
    *("left", "  left\n", "<think>right</think>left", "right</think>left", "<think>a</think>b<think>c</think>left"),
    *("I go <action>left</action> now", "<action>right</action> or rather <action>left</action>", "<action>left"),
    *("<action><action>left</action></action>", "<think><action>right</action></think>left"),
]


@pytest.mark.parametrize(
    ("reply", "text"), [*((reply, "left") for reply in LEFT), ("left</action>", "left</action>"), ("le\0ft", "le\0ft")]
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


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(max_size=9), JSON_VALUES, max_size=3),
    PROSE,
    PROSE,
    st.sampled_from(["{}", "```json\n{}\n```", "<action>{}</action>"]),
)
def test_json_object_is_found_in_prose(value: dict[str, Any], before: str, after: str, frame: str) -> None:
    text = before + frame.replace("{}", json.dumps(value)) + after
    assert parse_json_object(text) == value


@given(st.text())
def test_any_text_is_parsed_or_raises_action_error(text: str) -> None:
    for read in (extract_action, parse_whole_number, parse_json_object, parse_json_array, parse_calls):
        with suppress(ActionError):
            read(text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "}", "{x: 1}", "{'x': 1}", '{"x": NaN}', '{"x": 1e999}', '{"x": -Infinity}', '{"x": ' + "9" * 5000 + "}"],
)
def test_invalid_json_object(text: str) -> None:
    with pytest.raises(ActionError, match="must be a JSON object"):
        parse_json_object(text)


def test_last_outermost_object_counts() -> None:
    assert parse_json_object('{"x": 1} then {"y": {"z": 2}} and {broken') == {"y": {"z": 2}}
    assert parse_json_object('the set {a, b} and { so {"x": 1}') == {"x": 1}  # braces in prose hide nothing


def test_a_reply_with_too_many_brackets_is_refused_instead_of_an_earlier_object() -> None:
    assert parse_json_object('{"x": 1} ' + "{bad " * MAX_FAILURES + '{"x": 2}') == {"x": 2}
    with pytest.raises(ActionError, match="your reply has too many brackets"):
        parse_json_object('{"x": 1} ' + "{bad " * (MAX_FAILURES + 1) + '{"x": 2}')


@pytest.mark.parametrize("depth", [65, 500, 980, 5000])
def test_deeply_nested_value_is_refused(depth: int) -> None:
    with pytest.raises(ActionError, match="must be a JSON object, but it is invalid: it is nested too deeply"):
        parse_json_object('{"x":' * depth + "1" + "}" * depth)
    with pytest.raises(ActionError, match="must be a JSON array, but it is invalid: it is nested too deeply"):
        parse_json_array("[" * depth + "]" * depth)


@pytest.mark.parametrize("unit", ["{", CALL, '{"a":', "[", '{"a": 1', "<action>", "a"])
@pytest.mark.parametrize("read", [extract_action, parse_whole_number, parse_json_object, parse_json_array, parse_calls])
def test_parsing_is_linear(unit: str, read: Any) -> None:
    text = ('{"' if unit == "a" else "") + long_text(unit)
    with linear_time(), suppress(ActionError):
        read(text)
