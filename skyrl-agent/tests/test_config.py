from pathlib import Path

import pytest
import yaml
from agent_kit.engines import TOKENIZER, ScriptedEngine

from skyrl_agent import AgentConfig, AutoAgentRunner
from skyrl_train.errors import ConfigError, DataError

SKYRL_AGENT = Path(__file__).with_name("task_of_skyrl_agent.yaml").read_text(encoding="utf-8")
MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    return path


def test_a_task_file_of_skyrl_agent_is_read(tmp_path: Path) -> None:
    cfg = AgentConfig.load(write(tmp_path, SKYRL_AGENT))
    assert cfg.generator.max_response_length == 31232
    training, validation = (cfg.generator.sampling(is_training=value) for value in (True, False))
    assert (training.temperature, training.top_p, training.max_new_tokens) == (0.8, 0.95, 4096)
    assert (validation.temperature, validation.top_p, validation.stop) == (0.6, 0.95, ("</function>",))
    runner = AutoAgentRunner.from_task(cfg, ScriptedEngine(), TOKENIZER)
    assert runner.task.__name__ == "GeneralReactTask"
    with pytest.raises(FileNotFoundError, match="there is no task file"):
        AutoAgentRunner.from_task(tmp_path / "none.yaml", None, TOKENIZER)


@pytest.mark.parametrize(("line", "change", "message"), MISTAKES)
def test_mistakes_in_a_task_file_are_named(tmp_path: Path, line: str, change: str, message: str) -> None:
    assert line in SKYRL_AGENT
    with pytest.raises((ConfigError, DataError), match=message):
        AgentConfig.load(write(tmp_path, SKYRL_AGENT.replace(line, change, 1)))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"agent_cls": "skyrl_agent.agents.react.Agent"},
            ValueError,
            "agents.react:Agent': module skyrl_agent.agents.react",
        ),
        ({"agent_cls": "skyrl_agent.nothing.Agent"}, ValueError, "No module named 'skyrl_agent.nothing'"),
        ({"task": "skyrl_agent.agents.react.ReActAgent"}, ValueError, "must be a subclass of skyrl_agent.tasks.base"),
        ({"tools": ("finnish",)}, ConfigError, "there is no tool 'finnish'.*finish"),
        ({"tools": ({"name": "code_interpreter", "time": 3},)}, ConfigError, "code_interpreter has no setting 'time'"),
        ({"tools": ("skyrl_gym.tools.ToolGroup.x",)}, ConfigError, "No module named"),
        ({"tools": {"enable_bash_tool": True}}, ConfigError, "ReActAgent takes a list of tools"),
    ],
)
def test_agents_tasks_and_tools_that_do_not_exist_are_named(
    settings: dict[str, object], error: type[Exception], message: str
) -> None:
    cfg = AgentConfig.model_validate({"task": "skyrl_agent.tasks.general_react.GeneralReactTask", **settings})
    with pytest.raises(error, match=message):
        AutoAgentRunner.from_task(cfg, ScriptedEngine(), TOKENIZER)
