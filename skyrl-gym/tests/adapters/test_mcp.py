import sys
from collections.abc import Iterator
from typing import Any

import pytest
from gym_kit.messages import call, message_text, user
from gym_kit.processes import no_leaks
from gym_kit.servers import MCP_SERVER, run_mcp_server
from omegaconf import OmegaConf

from skyrl_gym.adapters.mcp import MCPEnv
from skyrl_gym.error import InvalidSpec, ToolFailure
from skyrl_gym.images import find_images, join_texts
from skyrl_gym.runtime.validation import validate_step_output

NOTES = {"notes": {"command": sys.executable, "args": [MCP_SERVER]}}
ROW = {"reward_spec": {"ground_truth": "Milk"}, "max_turns": 4}
QUESTION = user("What did I buy?")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_mcp_server() as url:
        yield url


def length_reward(answer: str, extras: Any) -> float | None:
    return len(answer) / 10 if answer else None


def test_an_episode_with_a_server_of_its_own() -> None:
    row = ROW | {"extra_info": {"env_config": {"servers": None}}}
    servers = {"notes": {**NOTES["notes"], "env": {"COLOUR": "ultramarine"}, "timeout": 20, "prefix": "my"}}
    with no_leaks(), MCPEnv(OmegaConf.create({"servers": servers}), row) as env:
        prompt, _ = env.init(QUESTION)
        assert '"name": "my_add_note"' in prompt[0]["content"]
        assert prompt[1:] == QUESTION
        first = message_text(env.step(call("my_add_note", text="milk") + call("my_fail", reason="out of paper")))
        assert first.startswith("<tool_response>\n1 notes\n</tool_response>\n<tool_response>\nError: ")
        assert "out of paper" in first
        assert "ultramarine" in message_text(env.step(call("my_environment")))
        last = env.step("<think>milk</think>The milk.")
        assert (last["reward"], last["done"]) == (1.0, True)
        assert env.get_metrics() == {"steps": 3, "tool_calls": 3, "tool_errors": 1}


@pytest.mark.parametrize("reads_images", [False, True])
def test_a_model_that_reads_images_sees_them(url: str, reads_images: bool) -> None:
    reply = call("draw", text="x" * 60_000) + call("add_note", text="tea")
    with MCPEnv({"servers": {"notes": {"url": url}}}, ROW | {"reads_images": reads_images}) as env:
        env.init(QUESTION)
        output = validate_step_output(env.step(reply))
    images = find_images(output["observations"])
    assert [(image.width, image.height) for image in images] == [(1, 1)] * reads_images
    text = join_texts(output["observations"][0]["content"])
    assert ("[image]" in text) == (not reads_images)
    assert "characters are left out" in text
    assert text.count("</tool_response>") == 2


def test_servers_with_equal_tool_names_need_a_prefix(url: str) -> None:
    servers = {"notes": {"url": url}, "more": {"url": url}}
    message = r"'notes' and 'more' both have a tool 'add_note'; set environment\.skyrl_gym\.mcp\.servers\.more\.prefix"
    with no_leaks(), pytest.raises(ValueError, match=message):
        MCPEnv({"servers": servers}, ROW)
    with no_leaks(), pytest.raises(ValueError, match="prefix='my notes' of 'notes'"):
        MCPEnv({"servers": {"notes": {"url": url, "prefix": "my notes"}}}, ROW)
    with MCPEnv({"servers": servers | {"more": {"url": url, "prefix": "more"}}}, ROW) as env:
        prompt, _ = env.init(QUESTION)
        assert '"name": "add_note"' in prompt[0]["content"]
        assert '"name": "more_add_note"' in prompt[0]["content"]
        assert "notes" in message_text(env.step(call("add_note", text="milk") + call("more_add_note", text="tea")))
        assert message_text(env.step(call("more_read_notes", joined_by=" "))).endswith("milk tea\n</tool_response>")


@pytest.mark.parametrize(
    ("reward", "answer", "expected"),
    [
        ("exact", "I bought milk", 0.0),
        ("contains", "I bought milk", 1.0),
        (f"{__name__}:length_reward", "12345", 0.5),
        (f"{__name__}:length_reward", "", None),
    ],
)
def test_rewards(url: str, reward: str, answer: str, expected: float | None) -> None:
    with MCPEnv({"servers": {"notes": {"url": url}}, "reward": reward}, ROW) as env:
        assert env.step(answer)["reward"] == expected


def test_session_is_closed_if_the_constructor_fails(url: str) -> None:
    with no_leaks(), pytest.raises(ToolFailure):
        MCPEnv({"servers": {"notes": {"url": url}, "gone": {"url": "http://127.0.0.1:1/mcp"}}}, ROW)


@pytest.mark.parametrize(
    ("env_config", "error", "message"),
    [
        (None, ValueError, r"environment\.skyrl_gym\.mcp\.servers is empty"),
        ({"servers": {"a": {"cmd": "x"}}}, ValueError, r"mcp\.servers\.a\.cmd is unknown"),
        ({"servers": {"a": "http://h"}}, ValueError, r"mcp\.servers\.a='http://h' should be a valid dictionary"),
        ({"servers": "http://h/mcp"}, ValueError, r"mcp\.servers='http://h/mcp' must be a section"),
        ({"servers": NOTES, "reward": "fuzzy"}, InvalidSpec, "module:attribute"),
    ],
)
def test_invalid_config_raises(env_config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MCPEnv(env_config, ROW)
