from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from gym_kit.messages import call
from gym_kit.texts import JSON_VALUES, linear_time, long_text
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, strip_thoughts

SEARCH = ToolCall("search", {"query": "Mount Fuji"})
JSON_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Mount Fuji"}}\n</tool_call>'
PLAIN_CALL = "<function=search>\n<parameter=query>\nMount Fuji\n</parameter>\n</function>"

names = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True)


@pytest.mark.parametrize(
    "text",
    [
        JSON_CALL,
        PLAIN_CALL,
        "I will search.\n" + JSON_CALL + "\n",
        JSON_CALL.removesuffix("\n</tool_call>"),
        JSON_CALL.removesuffix("</tool_call>") + "<|im_end|>",
        PLAIN_CALL.removesuffix("</parameter>\n</function>"),
        JSON_CALL.replace("tool_call", "function_call"),
        JSON_CALL.replace("arguments", "parameters"),
        JSON_CALL.replace("arguments", "params").replace('"name"', '"tool"'),
        "<think>" + JSON_CALL.replace("Fuji", "Etna") + "</think>" + JSON_CALL,
        "thoughts the prompt began" + JSON_CALL.replace("Fuji", "Etna") + "</think>" + JSON_CALL,
    ],
)
def test_ways_to_write_a_call(text: str) -> None:
    assert parse_tool_calls(text) == [SEARCH]


@pytest.mark.parametrize(
    "text", ["", "no call", "<think>" + JSON_CALL, "</tool_call>", '{"name": "search"}', "<tool_calls>{}</tool_calls>"]
)
def test_no_call(text: str) -> None:
    assert parse_tool_calls(text) == []


def test_several_calls_in_both_formats() -> None:
    assert parse_tool_calls(JSON_CALL + PLAIN_CALL + JSON_CALL) == [SEARCH] * 3
    text = (
        "<function=python>\n<parameter=code>\nif x:\n    print(x)\n\n</parameter><parameter=n>3</parameter></function>"
    )
    assert parse_tool_calls(text) == [ToolCall("python", {"code": "if x:\n    print(x)\n", "n": "3"})]


def test_lone_surrogates_are_replaced() -> None:
    (one,) = parse_tool_calls('<tool_call>{"name": "search", "arguments": {"q": ["\\ud83d"]}}</tool_call>')
    assert one.arguments == {"q": ["?"]}
    assert parse_tool_calls('<tool_call>{"name": "\\ud83d"}</tool_call><function=\ud83d>') == [ToolCall("?")] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", r"not valid JSON \(error at line 1, column 1: Expecting value\)"),
        ('{"name": "search"', "not valid JSON"),
        ("[1]", "is a JSON object"),
        ('"search"', "is a JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "search", "arguments": [1]}', '"arguments" of the tool call search must be a JSON object'),
        ('{"name": "search", "arguments": {"n": NaN}}', "it contains an invalid number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "\\ud83d", "arguments": 3}', r"of the tool call \? must be"),
    ],
)
def test_malformed_call_is_explained(body: str, message: str) -> None:
    with pytest.raises(ToolCallError, match=message):
        parse_tool_calls(f"{JSON_CALL}<tool_call>{body}</tool_call>")


@settings(max_examples=50)
@given(st.lists(st.tuples(names, st.dictionaries(names, JSON_VALUES, max_size=3)), max_size=3))
def test_round_trip(calls: list[tuple[str, dict[str, Any]]]) -> None:
    written = [call(name, **arguments) for name, arguments in calls if name not in arguments]
    assert parse_tool_calls("\n".join(written)) == [
        ToolCall(name, arguments) for name, arguments in calls if name not in arguments
    ]


@given(
    st.text()
    | st.lists(st.sampled_from([JSON_CALL, "<tool_call>", "</tool_call>", "<function=f>", "</think>"])).map("".join)
)
def test_any_text_can_be_parsed_or_raises_tool_call_error(text: str) -> None:
    with suppress(ToolCallError):
        assert all(call.name for call in parse_tool_calls(text))


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<function=f>", "<parameter=p>", "<think>", "</think>", "<function=f><parameter=p>"]
)
def test_parsing_is_linear(unit: str) -> None:
    with linear_time(), suppress(ToolCallError):
        parse_tool_calls(long_text(unit))


def test_thoughts() -> None:
    assert strip_thoughts("<think>a</think>b") == "b"
    assert strip_thoughts("a</think>b<think>c") == "b"
    assert strip_thoughts("<think>a") == ""
    assert strip_thoughts("b") == "b"
