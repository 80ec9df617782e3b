"""The tools of CodeActAgent, and the end of its loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_agent.agents.codeact import SWITCHES, UNSUPPORTED, CodeActAgent
from skyrl_agent.config import AgentConfig
from skyrl_agent.loading import load_class
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tasks.swe_bench import SWEBenchTask
from skyrl_train.errors import ConfigError


def test_switches_enable_tools() -> None:
    section = dict.fromkeys(SWITCHES, True) | dict.fromkeys(UNSUPPORTED, False)
    assert list(CodeActAgent.create_tools(section)) == ["execute_bash", "str_replace_editor", "think", "submit"]
    assert list(CodeActAgent.create_tools({"enable_cmd": True, "enable_bash_tool": False})) == ["execute_bash"]


def test_a_list_names_tools() -> None:
    tools = CodeActAgent.create_tools([{"name": "execute_bash", "timeout": 5}, "finish"])
    assert list(tools) == ["execute_bash", "finish"]


@pytest.mark.parametrize("switch", UNSUPPORTED)
def test_unsupported_switches_must_be_false(switch: str) -> None:
    with pytest.raises(ConfigError, match=f"tools.{switch}=true is not supported: .*; set it to false"):
        CodeActAgent.create_tools({"enable_bash_tool": True, switch: True})


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"enable_bash": True}, "no switch 'enable_bash'. Did you mean 'enable_bash_tool'? The switches are enable_"),
        ({"enable_bash_tool": False}, "no tool is enabled"),
    ],
)
def test_sections_without_a_tool_are_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("?", r"\?")):
        CodeActAgent.create_tools(section)


def test_the_example_names_an_agent_with_its_tools_and_a_task() -> None:
    cfg = AgentConfig.load(Path(__file__).parents[2] / "examples" / "swe_bench.yaml")
    agent = load_class(cfg.agent_cls, CodeActAgent)
    assert list(agent.create_tools(cfg.tools)) == ["execute_bash", "str_replace_editor", "think", "submit"]
    assert load_class(cfg.task, BaseTask) is SWEBenchTask
