from __future__ import annotations

import json

import pytest

from skyrl_gym.tools.calls import parse_tool_calls
from skyrl_gym.tools.messages import append_text, append_to_system, format_tool_response, format_tools_prompt

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}


def test_prompt_has_one_line_per_tool_and_an_example() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "{x} für"}} for name in ("one", "two")]
    lines = format_tools_prompt(tools).splitlines()
    first = lines.index("<tools>") + 1
    assert [json.loads(line) for line in lines[first : first + 2]] == tools
    assert lines[first + 2] == "</tools>"
    (call,) = parse_tool_calls(format_tools_prompt([]))
    assert (call.name, call.arguments) == ("<function-name>", {"<argument-name>": "<value>"})
    assert format_tool_response("42") == "<tool_response>\n42\n</tool_response>"


def test_a_system_message_is_extended_or_added() -> None:
    assert append_to_system([SYSTEM, USER], "Tools.") == [{"role": "system", "content": "Be brief.\n\nTools."}, USER]
    assert append_to_system([USER], "Tools.") == [{"role": "system", "content": "Tools."}, USER]
    assert append_to_system([USER], "") == [USER]
    assert append_to_system([], "Tools.") == [{"role": "system", "content": "Tools."}]
    assert SYSTEM["content"] == "Be brief."


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Be brief.", "Be brief.\n\nX."),
        ("", "X."),
        (None, "X."),
        ([{"type": "text", "text": "A"}], [{"type": "text", "text": "A"}, {"type": "text", "text": "X."}]),
    ],
)
def test_text_is_appended_to_any_content(content: object, expected: object) -> None:
    assert append_text({"role": "user", "content": content, "name": "Ann"}, "X.") == {
        "role": "user",
        "content": expected,
        "name": "Ann",
    }
