"""Training runs through the endpoint, with agents that use only OpenAI's interface."""

import math
from pathlib import Path
from typing import Any

import pytest
from agent_kit.endpoints import new_client
from agent_kit.scripted import HERMES
from endpoint_catch.learn import EndpointExp
from train_kit.messages import user
from train_kit.runs import run_of

from skyrl_agent.agent_generator import AgentGenerator
from skyrl_train.config import SkyRLConfig, parse_cli
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.types import PromptRow


@pytest.fixture
def arguments(catch_run: list[str]) -> list[str]:
    return [*catch_run, "trainer.ckpt_interval=-1"]


def train(experiment: type[EndpointExp], arguments: list[str]) -> list[dict[str, float]]:
    experiment(parse_cli(arguments)).run()
    return run_of(arguments).metrics


def check_games(metrics: list[dict[str, float]]) -> None:
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5
        assert (row["generate/n_invalid"], row["environment/avg_steps"], row["generate/avg_turns"]) == (0, 5, 5)
    assert "eval/environment/catch_rate" in metrics[2]


@pytest.mark.usefixtures("forked_processes")
def test_the_example_trains(arguments: list[str]) -> None:
    check_games(train(EndpointExp, arguments))


def experiment_of(agent: Any) -> type[EndpointExp]:
    """Return an experiment that trains this agent."""

    class AgentExp(EndpointExp):
        def get_generator(self, cfg: SkyRLConfig, tokenizer: Any, inference_engine_client: Any) -> RolloutGenerator:
            return AgentGenerator(agent, cfg.generator, inference_engine_client, tokenizer, in_own_process=False)

    return AgentExp


def test_the_policy_learns_from_rewards_of_its_agent(arguments: list[str]) -> None:
    async def rewards_even_tokens(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> float:
        async with new_client(base_url) as client:
            extra = {"return_token_ids": True}
            answer = await client.chat.completions.create(model=model, messages=row.prompt, extra_body=extra)
        return float(answer.choices[0].token_ids[0] % 2 == 0)

    overrides = [
        "trainer.max_training_steps=8",
        "trainer.epochs=4",
        "trainer.eval_interval=-1",
        "trainer.policy.optimizer_config.lr=2e-2",
        "trainer.policy_mini_batch_size=1",
        "trainer.algorithm.use_kl_loss=false",
        "generator.n_samples_per_prompt=8",
    ]
    _, *steps = train(experiment_of(rewards_even_tokens), [*arguments, *overrides])
    rewards = [step["reward/avg_raw_reward"] for step in steps]
    assert rewards[0] < 0.7
    assert sum(rewards[-3:]) / 3 > 0.75, rewards


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_an_agent_with_tools_and_side_requests_trains(arguments: list[str], tmp_path: Path, reduction: str) -> None:
    async def asks_for_a_title(*, base_url: str, model: str, row: PromptRow, **_: Any) -> float:
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        async with new_client(base_url) as client:
            await client.chat.completions.create(model=model, messages=[user("Title?")])
            await client.chat.completions.create(model=model, messages=row.prompt, tools=[tool])
            await client.chat.completions.create(model=model, messages=[user("Summary?")])
        return 1.0 if row.uid.endswith("1") else 0.5

    template = tmp_path / "hermes.jinja"
    template.write_text(HERMES)
    overrides = [
        "trainer.eval_interval=-1",
        f"trainer.algorithm.loss_reduction={reduction}",
        "generator.chat_template.source=file",
        f"generator.chat_template.name_or_path={template}",
    ]
    _, *steps = train(experiment_of(asks_for_a_title), [*arguments, *overrides])
    for step in steps:
        assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5
        assert math.isfinite(step["policy/policy_loss"])
        assert (step["agent/no_tool_calls"], step["agent/side_requests"]) == (1.0, 40), "two of each of 20 rollouts"
    metrics = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert [name for name in steps[0] if name.startswith("agent/") and f"`{name}`" not in metrics] == []
