"""A user script in the style of SkyRL: `@hydra.main`, and a custom experiment class, estimator and scalar loss."""

import os
from pathlib import Path

from train_kit.datasets import prompt_row
from train_kit.processes import run_python
from train_kit.runs import run_of, small_run

from skyrl_train.dataset.files import write_jsonl

SCRIPT = """
import hydra, torch
from omegaconf import DictConfig
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.utils.ppo_utils import (
    AdvantageEstimatorRegistry, PolicyLossRegistry, compute_grpo_outcome_advantage, reduce_loss, register_policy_loss,
)


def compute_simple_baseline(token_level_rewards, response_mask, index, **kwargs):
    with torch.no_grad():
        advantages, _ = compute_grpo_outcome_advantage(
            token_level_rewards=token_level_rewards, response_mask=response_mask, index=index, grpo_norm_by_std=False
        )
        return advantages, advantages


AdvantageEstimatorRegistry.register("simple_baseline", compute_simple_baseline)


@register_policy_loss("simple_reinforce")
def compute_reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    loss = -log_probs * advantages * config.custom["scale"]
    return reduce_loss(loss, loss_mask, config.loss_reduction, config.max_seq_len), 0.0


class GuessEnv(BaseTextEnv):
    def __init__(self, env_config: DictConfig, extras={}):
        super().__init__()
        self.bonus = env_config.bonus
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns >= self.max_turns
        again = [] if done else [{"role": "user", "content": "again"}]
        return BaseTextEnvStepOutput(observations=again, reward=self.bonus * len(action), done=done, metadata={})


class CountingGenerator(SkyRLGymGenerator):
    async def generate(self, input_batch):
        metadata = input_batch["batch_metadata"]
        print(f"{metadata.training_phase} {metadata.global_step}: {len(input_batch['prompts'])} rollouts")
        output = await super().generate(input_batch)
        output["rewards"] = [[2 * reward for reward in rewards] for rewards in output["rewards"]]
        return output


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return CountingGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            model_name=cfg.trainer.policy.model.path,
        )


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    assert "simple_reinforce" in PolicyLossRegistry.list_available()
    register(id="guess", entry_point="__main__:GuessEnv")
    Experiment(cfg).run()


if __name__ == "__main__":
    main()
"""


def test_a_script_for_skyrl_runs_unchanged(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "main_guess.py").write_text(SCRIPT)
    write_jsonl(tmp_path / "rows.jsonl", [prompt_row("guess", "guess", reward_spec={"ground_truth": "1"})] * 4)
    files = {"data": Path("rows.jsonl"), "val_data": Path("rows.jsonl")}
    settings = [
        "generator.n_samples_per_prompt=2",
        "generator.max_turns=2",
        "generator.sampling_params.max_generate_length=3",
        "+environment.skyrl_gym.guess.bonus=0.5",
        "trainer.algorithm.advantage_estimator=simple_baseline",
        "trainer.algorithm.policy_loss_type=simple_reinforce",
        "+trainer.algorithm.custom.scale=2.0",
        "trainer.micro_train_batch_size_per_gpu=3",
    ]
    overrides = small_run(tmp_path / "outputs", *settings, model=tiny_model_path, **files)
    plan = run_python("main_guess.py", *overrides, cwd=tmp_path, env=os.environ | {"SKYRL_DRY_RUN": "1"})
    assert "4 prompts × 2 samples = 8 trajectories" in plan
    assert "train 1: 8 rollouts" in run_python("main_guess.py", *overrides, cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main_guess.py", "outputs", "rows.jsonl"]
    last = run_of(overrides).metrics[-1]
    assert last["reward/avg_raw_reward"] > 0
    assert (last["policy/ppo_clip_ratio"], last["policy/grad_norm"] > 0) == (0, True)
