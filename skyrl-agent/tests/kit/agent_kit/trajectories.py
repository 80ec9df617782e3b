"""Trajectories of agents with scripted replies."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from agent_kit.engines import TOKENIZER, Script, ScriptedEngine, tool_call
from skyrl_agent import AgentConfig, AgentRunner, AutoAgentRunner, BaseTask, BaseTool
from skyrl_train.generators.base import BatchMetadata, rollout_requests
from skyrl_train.types import DrawnPrompt, Message, PromptRow, Trajectory

GENERAL = "skyrl_agent.tasks.general_react.GeneralReactTask"
ROW = {
    "prompt": [{"role": "user", "content": "What is the capital of France?"}],
    "data_source": "nq",
    "reward_spec": {"ground_truth": {"target": ["Paris"]}},
}
FINISH = tool_call("finish", answer="Paris")
"""The reply that solves `ROW`."""


class SimpleTask(BaseTask):
    """A task whose every result has the reward 1."""

    @classmethod
    def get_instruction(cls) -> list[Message]:
        return [Message(role="user", content="Go")]

    @classmethod
    def evaluate_result(cls) -> float:
        return 1.0


class Held(BaseTool):
    """A tool that counts how many of it are open. If it waits, its constructor returns when the test says so."""

    name = "held"
    description = "Held."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}
    n_open: ClassVar[int] = 0
    waits: ClassVar[bool] = False
    has_started: ClassVar[threading.Event]
    may_start: ClassVar[threading.Event]

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        Held.n_open += 1
        if Held.waits:
            Held.has_started.set()
            Held.may_start.wait(60)

    def call(self, params: dict[str, Any], **kwargs: Any) -> str:
        return ""

    def close(self) -> None:
        Held.n_open -= 1


HELD = f"{__name__}.Held"


async def cancel_a_task() -> None:
    task = asyncio.create_task(asyncio.sleep(3600))
    task.cancel()
    await task


def new_runner(
    replies: Sequence[str] | Script | ScriptedEngine = (),
    task: str = GENERAL,
    tools: Any = ("code_interpreter", "finish"),
    *,
    agent_cls: str | None = None,
    data: dict[str, Any] | None = None,
    dispatcher: dict[str, Any] | None = None,
    **generator: Any,
) -> AgentRunner:
    """Return a runner whose engine gives these replies. Further settings are those of the section `generator`."""
    engine = replies if isinstance(replies, ScriptedEngine) else ScriptedEngine(replies)
    sections = {"agent_cls": agent_cls, "data": data, "dispatcher": dispatcher, "generator": generator}
    chosen = {name: section for name, section in sections.items() if section}
    return AutoAgentRunner.from_task(
        AgentConfig.model_validate({"task": task, "tools": tools, **chosen}), engine, TOKENIZER
    )


async def play_row(runner: AgentRunner, row: dict[str, Any] = ROW, n_samples: int = 1) -> list[Trajectory]:
    """Play trajectories of a row, and close the runner."""
    extras = {key: value for key, value in row.items() if key != "prompt"}
    prompt = DrawnPrompt(0, PromptRow("0", row.get("prompt") or [], None, extras), 0)
    sampling = runner.cfg.generator.sampling(is_training=True)
    try:
        return await runner.play(rollout_requests([prompt], n_samples, ""), sampling, BatchMetadata(0, "train"))
    finally:
        await runner.close()


async def play_one(
    replies: Sequence[str] | Script, row: dict[str, Any] = ROW, *, context_length: int = 1_000_000, **settings: Any
) -> tuple[Trajectory, ScriptedEngine]:
    """Play one trajectory with a runner of these settings."""
    engine = ScriptedEngine(replies, context_length)
    (trajectory,) = await play_row(new_runner(engine, **settings), row)
    return trajectory, engine
