from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from skyrl_gym.adapters.mcp import MCPEnv
from skyrl_gym.error import InvalidSpec, ToolFailure

SERVER = str(Path(__file__).parents[1] / "tools" / "mcp_server.py")
NOTES = {"notes": {"command": sys.executable, "args": [SERVER]}}
ROW = {"reward_spec": {"ground_truth": "Milk"}, "max_turns": 4}
QUESTION = [{"role": "user", "content": "What did I buy?"}]


def length_reward(answer: str, extras: Any) -> float | None:
    """Return the length of the answer, or None without one."""
    return len(answer) / 10 if answer else None


def children() -> int:
    return len(psutil.Process().children(recursive=True))


def test_an_episode() -> None:
    before = children()
    with MCPEnv({"servers": NOTES}, ROW) as env:
        prompt, _ = env.init(QUESTION)
        assert '"name": "add_note"' in prompt[0]["content"]
        assert prompt[1:] == QUESTION
        call = '<tool_call>{"name": "add_note", "arguments": {"text": "milk"}}</tool_call>'
        first = env.step(call + '<tool_call>{"name": "fail", "arguments": {"reason": "out of paper"}}</tool_call>')
        (message,) = first["observations"]
        assert message["content"].startswith("<tool_response>\n1 notes\n</tool_response>\n<tool_response>\nError: ")
        assert "out of paper" in message["content"]
        last = env.step("<think>milk</think>The milk.")
        assert (last["reward"], last["done"]) == (1.0, True)
        assert env.get_metrics() == {"steps": 2, "tool_calls": 2, "tool_errors": 1}
        assert children() > before
    assert children() == before


def test_omegaconf_section_and_prefix_in_the_row() -> None:
    row = ROW | {"extra_info": {"env_config": {"reward": "contains", "servers": None}}}
    servers = {"notes": {**NOTES["notes"], "env": {"COLOUR": "ultramarine"}, "timeout": 20, "prefix": "my"}}
    with MCPEnv(OmegaConf.create({"servers": servers}), row) as env:
        env.init(QUESTION)
        output = env.step('<tool_call>{"name": "my_environment"}</tool_call>')
        assert "ultramarine" in output["observations"][0]["content"]
        assert env.step("I bought milk")["reward"] == 1.0


def test_servers_with_equal_tool_names_need_a_prefix() -> None:
    before = children()
    message = r"'notes' and 'more' both have a tool 'add_note'; set environment\.skyrl_gym\.mcp\.servers\.more\.prefix"
    with pytest.raises(ValueError, match=message):
        MCPEnv({"servers": {**NOTES, "more": NOTES["notes"]}}, ROW)
    assert children() == before
    with MCPEnv({"servers": {**NOTES, "more": {**NOTES["notes"], "prefix": "more"}}}, ROW) as env:
        prompt, _ = env.init(QUESTION)
        assert '"name": "add_note"' in prompt[0]["content"]
        assert '"name": "more_add_note"' in prompt[0]["content"]
        add = '<tool_call>{"name": "more_add_note", "arguments": {"text": "milk"}}</tool_call>'
        assert "1 notes" in env.step(add)["observations"][0]["content"]
        read = '<tool_call>{"name": "read_notes"}</tool_call><tool_call>{"name": "more_read_notes"}</tool_call>'
        (message,) = env.step(read)["observations"]
        assert message["content"] == "<tool_response>\n\n</tool_response>\n<tool_response>\nmilk\n</tool_response>"


@pytest.mark.parametrize(
    ("reward", "answer", "expected"),
    [
        ("exact", "I bought milk", 0.0),
        ("contains", "I bought milk", 1.0),
        ("contains", "tea", 0.0),
        ("contains", "milkshake", 0.0),
        ("exact", "", 0.0),
        (f"{__name__}:length_reward", "12345", 0.5),
        (f"{__name__}:length_reward", "", None),
    ],
)
def test_rewards(reward: str, answer: str, expected: float | None) -> None:
    with MCPEnv({"servers": NOTES, "reward": reward}, ROW) as env:
        assert env.step(answer)["reward"] == expected


def test_session_is_closed_if_the_constructor_fails() -> None:
    before = children()
    with pytest.raises(ToolFailure):
        MCPEnv({"servers": NOTES | {"gone": {"url": "http://127.0.0.1:1/mcp"}}}, ROW)
    assert children() == before


@pytest.mark.parametrize(
    ("env_config", "error", "message"),
    [
        (None, ValueError, r"environment\.skyrl_gym\.mcp\.servers names no server"),
        ({"servers": {"a": {"cmd": "x"}}}, ValueError, r"mcp\.servers\.a\.cmd is unknown"),
        ({"servers": {"a": {}}}, ValueError, "either a command or a url"),
        (
            {"servers": {"a": "http://h/mcp"}},
            ValueError,
            r"mcp\.servers\.a='http://h/mcp' should be a valid dictionary",
        ),
        ({"servers": "http://h/mcp"}, ValueError, r"mcp\.servers='http://h/mcp' must be a section"),
        ({"servers": {"notes": {**NOTES["notes"], "prefix": "my notes"}}}, ValueError, "prefix='my notes' of 'notes'"),
        ({"servers": NOTES, "reward": "fuzzy"}, InvalidSpec, "module:attribute"),
    ],
)
def test_invalid_config_raises(env_config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MCPEnv(env_config, ROW)
