from __future__ import annotations

import json
import time

import pytest

from skyrl_gym.adapters.actions import ActionError
from skyrl_gym.adapters.tool_messages import calls_in, tool_response, tools_prompt, with_system
from skyrl_gym.tools.calls import MAX_CALLS

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_the_prompt_shows_each_tool_on_a_line() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "{x} für"}} for name in ("one", "two")]
    lines = tools_prompt(tools).splitlines()
    first = lines.index("<tools>") + 1
    assert [json.loads(line) for line in lines[first : first + 2]] == tools
    assert lines[first + 2] == "</tools>"


def test_the_example_in_the_prompt_is_a_call() -> None:
    (call,) = calls_in(tools_prompt([]).rpartition("between")[2].partition("</tool_call>:")[2])
    assert (call.name, call.arguments) == ("function-name", {"argument-name": "value"})


def test_a_system_message_is_extended_or_added() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}
    assert with_system([system, user], "Tools.") == [{"role": "system", "content": "Be brief.\n\nTools."}, user]
    assert with_system([user], "Tools.") == [{"role": "system", "content": "Tools."}, user]
    assert with_system([user], "") == [user]


def test_calls_are_limited() -> None:
    assert len(calls_in(CALL * MAX_CALLS)) == MAX_CALLS
    with pytest.raises(ActionError, match=f"more than {MAX_CALLS} tool calls"):
        calls_in(CALL * (MAX_CALLS + 1))


def test_a_call_that_cannot_be_read_is_told() -> None:
    with pytest.raises(ActionError, match="not valid JSON"):
        calls_in(CALL + "<tool_call>{</tool_call>")


def test_a_megabyte_of_calls_is_judged_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(ActionError):
        calls_in(CALL * 18_000)
    assert time.monotonic() - started < 0.5


def test_a_response_is_marked() -> None:
    assert tool_response("42") == "<tool_response>\n42\n</tool_response>"
