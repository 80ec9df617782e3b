"""Agents that use an API over HTTP, and generators that train them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import OpenAI
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_kit.endpoints import new_client, new_engine
from agent_kit.scripted import CharacterEngine
from examples.catch.catch_dataset import CatchDataset
from skyrl_agent.agent_generator import AgentGenerator
from skyrl_train.config import load_config
from skyrl_train.generators.base import BatchMetadata, RolloutRequest, rollout_requests
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory

SAMPLING = SamplingParams(max_new_tokens=3, temperature=0.7)
TRAIN = BatchMetadata(1, "train")
OWN_OPTIONS = {"in_own_process", "max_concurrent_agents", "trains_side_requests"}


async def ask_once(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> float:
    """Answer a prompt with one reply of the model: the simplest agent. Its reward is 1."""
    async with new_client(base_url) as client:
        await client.chat.completions.create(model=model, messages=row.prompt)
    return 1.0


def ask_once_blocking(**options: Any) -> float:
    """Answer a prompt as `ask_once` does, in a thread."""
    with OpenAI(base_url=options["base_url"], api_key=options["api_key"]) as client:
        client.chat.completions.create(model=options["model"], messages=options["row"].prompt)
    return 1.0


def assert_equal_trajectories(trajectories: Sequence[Trajectory], expected: Sequence[Trajectory]) -> None:
    """Compare tokens, rewards and metrics; the last digits of log-probs depend on the batches of the engine."""
    for t, other in zip(trajectories, expected, strict=True):
        assert (t.prompt_ids, t.response_ids, t.loss_mask) == (other.prompt_ids, other.response_ids, other.loss_mask)
        assert (t.rewards, t.stop_reason, t.env_metrics) == (other.rewards, other.stop_reason, other.env_metrics)
        assert t.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def catch_requests(n_games: int, n_samples: int = 1) -> list[RolloutRequest]:
    """Return rollout requests of games of Catch."""
    rows = []
    for i, row in enumerate(CatchDataset(train_size=n_games).train_rows()):
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        rows.append(PromptRow(str(i), row["prompt"], "catch", extras))
    return rollout_requests([DrawnPrompt(i, row, i) for i, row in enumerate(rows)], n_samples, "catch")


@dataclass
class AgentStage:
    """Generators that run agents and share an engine; `close` closes them."""

    model: PreTrainedModel | CharacterEngine
    tokenizer: PreTrainedTokenizerBase
    generators: list[AgentGenerator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = new_engine(self.model, self.tokenizer)

    def generator(self, agent: Any, **options: Any) -> AgentGenerator:
        """Create a generator with `options`: its own ones, else keys of the configuration."""
        own: dict[str, Any] = {"in_own_process": False}
        own |= {name: options.pop(name) for name in OWN_OPTIONS & options.keys()}
        cfg = load_config({"trainer": {"max_prompt_length": 1}, "generator": {"n_rollout_retries": 0} | options})
        self.generators.append(AgentGenerator(agent, cfg.generator, self.engine, self.tokenizer, **own))
        return self.generators[-1]

    async def play(
        self, agent: Any, requests: list[RolloutRequest], sampling: SamplingParams = SAMPLING, **options: Any
    ) -> list[Trajectory]:
        return await self.generator(agent, **options).rollout(requests, sampling, TRAIN)

    async def close(self) -> None:
        for generator in self.generators:
            await generator.close()
        await self.engine.close()
