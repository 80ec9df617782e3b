"""Scripts in the form of SkyRL's example mains run unchanged, with their launch lines in sizes for a CPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_kit.processes import TRAIN_FOLDER, run_python
from train_kit.runs import Run

from skyrl_train.dataset.files import write_jsonl

pytestmark = pytest.mark.timeout(600)

IMPORTS = """
import hydra
import ray
import torch
from omegaconf import DictConfig
from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.utils import initialize_ray
"""

ESTIMATOR = f"""{IMPORTS}
from skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry


def compute_simple_baseline_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list, **kwargs
):
    with torch.no_grad():
        rewards = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
        advantages = (rewards - rewards.mean()) * response_mask
        return advantages, advantages.clone()


AdvantageEstimatorRegistry.register("simple_baseline", compute_simple_baseline_advantage)
"""

LOSS = f"""
from typing import Optional, Tuple
{IMPORTS}
from skyrl_train.utils.ppo_utils import PolicyLossRegistry


def compute_reinforce_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: DictConfig,
    loss_mask: Optional[torch.Tensor] = None,
    rollout_logprobs: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, float]:
    loss = (-log_probs * advantages).mean()
    return loss, 0.0


PolicyLossRegistry.register("reinforce", compute_reinforce_policy_loss)
"""

FULLY_ASYNC = f"""{IMPORTS}
import asyncio
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer


class FullyAsyncPPOExp(BasePPOExp):
    def get_trainer(
        self,
        cfg,
        tracker,
        tokenizer,
        train_dataset,
        eval_dataset,
        inference_engine_client,
        generator,
        colocate_pg,
    ):
        return FullyAsyncRayPPOTrainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )
"""

OWN_RUN = """
    def run(self):
        trainer = self._setup_trainer()
        asyncio.run(trainer.train())
"""

MAIN = """

@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    exp = {experiment}(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
"""

NEW_LAYOUT_DAPO = """
import sys
from dataclasses import dataclass

import ray
import torch
from skyrl.train.config import AlgorithmConfig, make_config
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import initialize_ray, validate_cfg


@dataclass
class PenaltyConfig(AlgorithmConfig):
    overlong_buffer_len: int = 2
    penalty: float = 0.25


Config = make_config(algorithm_cls=PenaltyConfig)


class PenaltyTrainer(RayPPOTrainer):
    @torch.no_grad()
    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids):
        algorithm, engine = self.cfg.trainer.algorithm, self.cfg.generator.inference_engine
        assert (algorithm.overlong_buffer_len, engine.num_engines) == (2, 1)
        generator_output["rewards"] = [reward - algorithm.penalty for reward in generator_output["rewards"]]
        output, uids = super().postprocess_generator_output(generator_output, uids)
        return output, uids


class PenaltyExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return PenaltyTrainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg):
    PenaltyExp(cfg).run()


def main() -> None:
    cfg = Config.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
"""

LAUNCH = """
data.train_data=['{folder}/rows.jsonl'] data.val_data=['{folder}/rows.jsonl'] trainer.output_dir={folder}/outputs
trainer.policy.model.path={model} trainer.strategy=fsdp2 trainer.placement.colocate_all=true
trainer.placement.policy_num_gpus_per_node=1 trainer.placement.ref_num_gpus_per_node=1
trainer.epochs=1 trainer.update_epochs_per_batch=1 trainer.train_batch_size=4 trainer.policy_mini_batch_size=2
trainer.micro_forward_batch_size_per_gpu=2 trainer.micro_train_batch_size_per_gpu=2 trainer.eval_batch_size=8
trainer.eval_before_train=false trainer.eval_interval=2 trainer.ckpt_interval=-1 trainer.max_prompt_length=256
trainer.policy.optimizer_config.lr=1.0e-4 trainer.algorithm.use_kl_loss=true trainer.logger=console
trainer.project_name=examples trainer.run_name=test_run trainer.resume_mode=null
generator.num_inference_engines=1 generator.inference_engine_tensor_parallel_size=1
generator.sampling_params.max_generate_length=4 generator.n_samples_per_prompt=2 generator.async_engine=true
generator.run_engines_locally=true generator.weight_sync_backend=nccl generator.batched=true
generator.gpu_memory_utilization=0.4
"""

Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def launch(tiny_model_path: Path, tmp_path: Path) -> Launch:
    """Run `python …` in a folder with the lines that launch SkyRL's examples; return the logged metrics."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 10\n"
    )

    def run(command: list[str], row: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
        write_jsonl(tmp_path / "rows.jsonl", [row] * 8)
        run_python(
            *command,
            *LAUNCH.format(folder=tmp_path, model=tiny_model_path).split(),
            *overrides,
            cwd=tmp_path,
            env=os.environ | {"RAY_ADDRESS": "local"},
        )
        finished = Run(tmp_path / "outputs/examples/test_run")
        assert finished.steps == [0, 1, 2]
        return finished.metrics[1:]

    return run


SCORED = {"prompt": [{"role": "user", "content": "say something"}], "env_class": "reward_function"}
REWARD = ["custom_reward_function.path=reward.py"]


def test_a_trainer_and_keys_of_the_new_layout(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "main_penalty.py").write_text(NEW_LAYOUT_DAPO)
    keys = ["trainer.algorithm.penalty=0.5", "generator.inference_engine.num_engines=1", "trainer.strategy=fsdp"]
    for step in launch(["main_penalty.py"], SCORED, *keys, *REWARD):
        assert step["loss/avg_final_rewards"] - step["reward/avg_raw_reward"] == pytest.approx(-0.5)
        assert step["policy/grad_norm"] > 0


@pytest.mark.parametrize("run", ["", OWN_RUN], ids=["", "own_run"])
@pytest.mark.parametrize(
    "placement", ["trainer.placement.colocate_all=false", "trainer.fully_async.enabled=true"], ids=["ray", "inline"]
)
def test_the_fully_asynchronous_trainer(placement: str, run: str, launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "main_fully_async.py").write_text(FULLY_ASYNC + run + MAIN.format(experiment="FullyAsyncPPOExp"))
    settings = [
        placement,
        "trainer.policy_mini_batch_size=4",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.fully_async.num_parallel_generation_workers=8",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "generator.batched=false",
    ]
    steps = launch(["main_fully_async.py"], SCORED, *settings, *REWARD)
    assert all(step["async/staleness_max"] <= step["step"] - 1 for step in steps)
    assert all(step["sync/verified_copies"] == 1 and step["policy/grad_norm"] > 0 for step in steps)


def test_the_task_of_the_package_and_a_policy_loss_that_returns_a_mean(launch: Launch, tmp_path: Path) -> None:
    script = LOSS.replace("import BasePPOExp, config_dir,", "import config_dir, skyrl_entrypoint,")
    (tmp_path / "main.py").write_text(script + MAIN[MAIN.index("@hydra.main") :])
    steps = launch(["main.py"], SCORED, "trainer.algorithm.policy_loss_type=reinforce", *REWARD)
    for step in steps:
        assert step["policy/ppo_clip_ratio"] == 0.0
        assert step["policy/policy_loss"] != 0
        assert step["policy/grad_norm"] > 0


OWN_ENVIRONMENT = """
from typing import Any

from omegaconf import DictConfig
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class LengthEnv(BaseTextEnv):
    def __init__(self, env_config: DictConfig, extras: dict[str, Any] = {}):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action)), done=True, metadata={})
"""


DECORATED_LOSS = """
from skyrl_gym.envs import register
from skyrl_train.utils.ppo_utils import register_policy_loss

register(id="length", entry_point="__main__:LengthEnv")


@register_policy_loss("reinforce")
def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return (-log_probs * advantages * loss_mask).sum() / loss_mask.sum(), 0.0
"""


def test_registrations_of_a_script_reach_two_ranks(launch: Launch, tmp_path: Path) -> None:
    script = ESTIMATOR + OWN_ENVIRONMENT + DECORATED_LOSS + MAIN.format(experiment="BasePPOExp")
    (tmp_path / "main_length.py").write_text(script)
    settings = [
        "trainer.algorithm.advantage_estimator=simple_baseline",
        "trainer.algorithm.policy_loss_type=reinforce",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.placement.ref_num_gpus_per_node=2",
    ]
    row = {"prompt": [{"role": "user", "content": "say something"}], "env_class": "length"}
    for step in launch(["main_length.py"], row, *settings):
        assert step["reward/avg_raw_reward"] > 1
        assert step["loss/avg_raw_advantages_abs"] > 0
        assert step["policy/grad_norm"] > 0


def test_an_environment_of_the_users_own_module(launch: Launch, tmp_path: Path) -> None:
    main = (TRAIN_FOLDER / "examples/multiply/main_multiply.py").read_text()
    registered = '(id="length", entry_point="tasks.length.env:LengthEnv")'
    main = main.replace('(id="multiply", entry_point="examples.multiply.env:MultiplyEnv")', registered)
    assert registered in main
    folder = tmp_path / "tasks/length"
    folder.mkdir(parents=True)
    (folder / "env.py").write_text(OWN_ENVIRONMENT)
    (folder / "main_length.py").write_text(main)
    row = {"prompt": [{"role": "user", "content": "say something"}]}
    steps = launch(["-m", "tasks.length.main_length"], row, "environment.env_class=length")
    assert all(step["reward/avg_raw_reward"] > 1 for step in steps)
