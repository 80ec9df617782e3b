"""Training runs through the endpoint, with agents that use only OpenAI's interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from generators.endpoint.conftest import new_client
from transformers import PreTrainedTokenizerBase

from examples.catch.env import CatchEnv
from examples.endpoint.main_endpoint_catch import EndpointExp
from skyrl_train.config import SkyRLConfig, parse_cli
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.endpoint import AgentGenerator, AgentResult
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.types import PromptRow


@pytest.fixture
def arguments(catch_run: list[str]) -> list[str]:
    return [*catch_run, "trainer.ckpt_interval=-1"]


def train(experiment: type[EndpointExp], arguments: list[str], tmp_path: Path) -> list[dict[str, float]]:
    experiment(parse_cli(arguments)).run()
    return [json.loads(line) for line in (tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()]


def check_games(metrics: list[dict[str, float]]) -> None:
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5
        assert (row["generate/n_invalid"], row["environment/avg_steps"], row["generate/avg_turns"]) == (0, 5, 5)
    assert "eval/environment/catch_rate" in metrics[2]


def test_the_example_trains(arguments: list[str], tmp_path: Path) -> None:
    check_games(train(EndpointExp, arguments, tmp_path))


def test_litellm_trains(arguments: list[str], tmp_path: Path, litellm: Any) -> None:
    async def play(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> AgentResult:
        game = CatchEnv(env_config={}, extras=row.env_extras)
        messages, rewards = list(row.prompt), []
        while not game.state.is_over:
            answer = await litellm.acompletion(f"openai/{model}", messages, api_base=base_url, api_key=api_key)
            reply = answer.choices[0].message.content
            turn = game.step(reply)
            rewards.append(turn["reward"])
            messages += [{"role": "assistant", "content": reply}, *turn["observations"]]
        return AgentResult(rewards, metrics=game.get_metrics())

    class LiteLLMExp(EndpointExp):
        def get_generator(
            self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
        ) -> GeneratorInterface:
            return AgentGenerator(play, cfg.generator, inference_engine_client, tokenizer, in_own_process=False)

    check_games(train(LiteLLMExp, arguments, tmp_path))


def test_the_policy_learns_from_rewards_of_its_agent(arguments: list[str], tmp_path: Path) -> None:
    async def rewards_even_tokens(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> float:
        async with new_client(base_url) as client:
            extra = {"return_token_ids": True}
            answer = await client.chat.completions.create(model=model, messages=row.prompt, extra_body=extra)
        return float(answer.choices[0].token_ids[0] % 2 == 0)

    class EvenExp(EndpointExp):
        def get_generator(
            self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
        ) -> GeneratorInterface:
            return AgentGenerator(
                rewards_even_tokens, cfg.generator, inference_engine_client, tokenizer, in_own_process=False
            )

    overrides = [
        "trainer.max_training_steps=12",
        "trainer.epochs=6",
        "trainer.eval_interval=-1",
        "trainer.policy.optimizer_config.lr=1e-2",
        "trainer.policy_mini_batch_size=1",
        "trainer.algorithm.use_kl_loss=false",
        "generator.n_samples_per_prompt=8",
    ]
    rewards = [row["reward/avg_raw_reward"] for row in train(EvenExp, [*arguments, *overrides], tmp_path)[1:]]
    assert rewards[0] < 0.7
    assert sum(rewards[-3:]) / 3 > 0.75, rewards
