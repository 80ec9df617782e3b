"""A script for SkyRL: an experiment in a Ray task, with registrations and a trainer of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hydra
import ray
import torch
from omegaconf import DictConfig
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.ppo_utils import register_advantage_estimator, register_policy_loss


class GuessEnv(BaseTextEnv):
    def __init__(self, env_config: DictConfig, extras={}):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action)), done=True, metadata={})


register(id="guess", entry_point="__main__:GuessEnv")


@register_advantage_estimator("simple_baseline")
def simple_baseline(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **kwargs):
    with torch.no_grad():
        rewards = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
        advantages = (rewards - rewards.mean()) * response_mask
        return advantages, advantages


@register_policy_loss("reinforce")
def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return (-log_probs * advantages * loss_mask).sum() / loss_mask.sum(), 0.0


class LoudTrainer(RayPPOTrainer):
    async def train(self):
        print(f"LoudTrainer has {len(self.train_dataset)} prompts")
        await super().train()


class Experiment(BasePPOExp):
    def get_trainer(self, cfg, tracker, tokenizer, train_dataset, eval_dataset, inference_engine_client, generator,
                    colocate_pg):
        return LoudTrainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    Experiment(cfg).run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
"""


def test_a_script_for_skyrl_runs_unchanged_on_two_ranks(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "main_guess.py").write_text(SCRIPT)
    row = {"prompt": [{"role": "user", "content": "guess"}], "env_class": "guess", "reward_spec": {"ground_truth": "1"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    finished = subprocess.run(
        [
            *(sys.executable, "main_guess.py"),
            "data.train_data=['rows.jsonl']",
            "data.val_data=[]",
            f"trainer.policy.model.path={tiny_model_path}",
            "trainer.run_name=test_run",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.eval_interval=-1",
            "trainer.algorithm.advantage_estimator=simple_baseline",
            "trainer.algorithm.policy_loss_type=reinforce",
            "trainer.placement.policy_num_gpus_per_node=2",
            "generator.n_samples_per_prompt=2",
            "generator.sampling_params.max_generate_length=3",
        ],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "LoudTrainer has 4 prompts" in finished.stdout + finished.stderr
    last = json.loads((tmp_path / "outputs/skyrl/test_run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/avg_raw_reward"] > 0
    assert last["policy/grad_norm"] > 0
