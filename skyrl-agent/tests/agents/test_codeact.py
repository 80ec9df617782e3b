from pathlib import Path
from typing import Any

import pytest
from agent_kit.engines import tool_call
from agent_kit.trajectories import play_one

from skyrl_agent.agents.codeact import SWITCHES, UNSUPPORTED, CodeActAgent
from skyrl_agent.config import AgentConfig
from skyrl_agent.loading import load_class
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tasks.swe_bench import SWEBenchTask
from skyrl_train.errors import ConfigError

CODEACT, REACT = "skyrl_agent.agents.codeact.CodeActAgent", "skyrl_agent.agents.react.ReActAgent"


def test_switches_enable_tools() -> None:
    section = dict.fromkeys(SWITCHES, True) | dict.fromkeys(UNSUPPORTED, False)
    assert list(CodeActAgent.create_tools(section)) == ["execute_bash", "str_replace_editor", "think", "submit"]
    assert list(CodeActAgent.create_tools({"enable_cmd": True, "enable_bash_tool": False})) == ["execute_bash"]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"enable_bash": True}, r"no switch 'enable_bash'. Did you mean 'enable_bash_tool'\? The switches are enable_"),
        ({"enable_bash_tool": False}, "no tool is enabled"),
        *(
            ({"enable_bash_tool": True, switch: True}, f"tools.{switch}=true is not supported: .*; set it to false")
            for switch in UNSUPPORTED
        ),
    ],
)
def test_unusable_switches_are_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CodeActAgent.create_tools(section)


def test_the_example_names_an_agent_with_its_tools_and_a_task() -> None:
    cfg = AgentConfig.load(Path(__file__).parents[2] / "examples" / "swe_bench.yaml")
    agent = load_class(cfg.agent_cls, CodeActAgent)
    assert list(agent.create_tools(cfg.tools)) == ["execute_bash", "str_replace_editor", "think", "submit"]
    assert load_class(cfg.task, BaseTask) is SWEBenchTask


POLL = tool_call("think", thought="Is it done?")


@pytest.mark.parametrize(
    ("agent_cls", "settings", "reason", "n_turns"),
    [
        (CODEACT, {}, "stuck_in_a_loop", 4),
        (CODEACT, {"max_repeats": 0}, "max_iterations_reached", 8),
        (REACT, {}, "max_iterations_reached", 8),
        (REACT, {"max_repeats": 2}, "stuck_in_a_loop", 2),
    ],
)
async def test_the_task_file_limits_equal_calls(
    agent_cls: str, settings: dict[str, Any], reason: str, n_turns: int
) -> None:
    trajectory, _ = await play_one(
        [POLL] * 8, agent_cls=agent_cls, tools=("think", "submit"), max_iterations=8, **settings
    )
    assert (trajectory.stop_reason, len(trajectory.turns)) == (reason, n_turns)


async def test_another_result_ends_the_repetition() -> None:
    replies = [POLL, POLL, tool_call("think", thought="Wait."), POLL, POLL, tool_call("submit")]
    trajectory, _ = await play_one(replies, agent_cls=CODEACT, tools=("think", "submit"), max_repeats=3)
    assert trajectory.stop_reason == "FINISH_TOOL"
