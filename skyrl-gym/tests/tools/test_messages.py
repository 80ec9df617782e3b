from __future__ import annotations

import json

import pytest

from skyrl_gym.tools.calls import parse_tool_calls
from skyrl_gym.tools.messages import extended, readable, tool_response, tools_prompt, with_system

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}


def test_the_prompt_shows_each_tool_on_a_line() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "{x} für"}} for name in ("one", "two")]
    lines = tools_prompt(tools).splitlines()
    first = lines.index("<tools>") + 1
    assert [json.loads(line) for line in lines[first : first + 2]] == tools
    assert lines[first + 2] == "</tools>"


def test_the_example_in_the_prompt_is_a_call() -> None:
    (call,) = parse_tool_calls(tools_prompt([]))
    assert (call.name, call.arguments) == ("<function-name>", {"<argument-name>": "<value>"})


def test_a_system_message_is_extended_or_added() -> None:
    assert with_system([SYSTEM, USER], "Tools.") == [{"role": "system", "content": "Be brief.\n\nTools."}, USER]
    assert with_system([USER], "Tools.") == [{"role": "system", "content": "Tools."}, USER]
    assert with_system([USER], "") == [USER]
    assert with_system([], "Tools.") == [{"role": "system", "content": "Tools."}]
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
def test_a_message_of_any_content_is_extended(content: object, expected: object) -> None:
    assert extended({"role": "user", "content": content, "name": "Ann"}, "X.") == {
        "role": "user",
        "content": expected,
        "name": "Ann",
    }


def test_a_response_is_marked() -> None:
    assert tool_response("42") == "<tool_response>\n42\n</tool_response>"


def test_lone_surrogates_do_not_reach_the_tokenizer() -> None:
    assert readable("a\ud83db") == "a?b"
    assert tool_response("\ud83d") == "<tool_response>\n?\n</tool_response>"
    assert '"description": "?"' in tools_prompt([{"description": "\udc00"}])
