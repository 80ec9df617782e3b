import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit.engines import TOKENIZER, ScriptedEngine
from pydantic import BaseModel

from skyrl_agent import AgentConfig, AutoAgentRunner, BaseAgent, BaseTask
from skyrl_agent.runner import RATIOS, agent_metrics
from skyrl_agent.tools import tool_registry
from skyrl_train.config.problems import FIELDS

GUIDE = (Path(__file__).parents[2] / "docs/guides/agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|yaml)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
KEY = re.compile(r"`((?:data|generator|dispatcher)\.\w+(?:\.\w+)*)`")


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys(inner, f"{prefix}{name}.")


def test_keys_tools_and_metrics_of_the_guide_exist() -> None:
    known = {*keys(AgentConfig), *FIELDS}
    named = set(KEY.findall(GUIDE))
    assert len(named) > 15
    assert named <= known
    table = re.search(r"^\| name \| result \|.*?\n\n", GUIDE, re.MULTILINE | re.DOTALL)
    assert table is not None
    listed = {name for line in table[0].strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert listed == set(tool_registry) - {"lookup"}
    paragraph = GUIDE[GUIDE.index("Metrics of a step") :].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", paragraph))
    code = Path(agent_metrics.__code__.co_filename).read_text(encoding="utf-8")
    assert len(named) > 5
    assert all(name in RATIOS or f'"{name}"' in code for name in named)


def test_the_task_file_of_the_guide_makes_a_runner(tmp_path: Path) -> None:
    (text,) = (code for language, code in BLOCKS if language == "yaml")
    path = tmp_path / "task.yaml"
    path.write_text(text)
    runner = AutoAgentRunner.from_task(path, ScriptedEngine(), TOKENIZER)
    assert runner.cfg.dispatcher.max_parallel_agents == 64


async def test_the_tool_the_task_and_the_agent_of_the_guide_play(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    for language, code in BLOCKS:
        if language == "python":
            exec(code, names)
    tool_registry.pop("lookup")
    assert issubclass(names["TwiceAgent"], BaseAgent)
    assert issubclass(names["CountTask"], BaseTask)
    for name in ("TwiceAgent", "CountTask"):
        monkeypatch.setitem(globals(), name, names[name])
    cfg = AgentConfig.model_validate({"agent_cls": f"{__name__}.TwiceAgent", "task": f"{__name__}.CountTask"})
    runner = AutoAgentRunner.from_task(cfg, ScriptedEngine(["4", "3"]), TOKENIZER)
    output = await runner.run([{"word": "cat"}])
    await runner.close()
    assert output["traj_rewards"] == [1.0] * 8
    assert names["Lookup"]().call({"word": "cat"}, agent=None, trajectory_id="") == "cat: a word"
