"""A script for SkyRL's new layout trains, without Ray."""

from pathlib import Path

from train_kit.datasets import prompt_row
from train_kit.processes import run_python
from train_kit.runs import run_of, small_run

from skyrl_train.dataset.files import write_jsonl

SCRIPT = """
import sys

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class LengthEnv(BaseTextEnv):
    def __init__(self, env_config, extras={}):
        super().__init__()
        self.scale = env_config.scale

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=self.scale * len(action), done=True, metadata={})


class CheckedGenerator(SkyRLGymGenerator):
    async def generate(self, input_batch):
        assert self.generator_cfg.inference_engine.backend == "auto"
        return await super().generate(input_batch)


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return CheckedGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
        )


def compute_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return (-log_probs * advantages).mean(), {"clip_ratio": 0.25}


PolicyLossRegistry.register("score_function", compute_loss)


def main() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    register(id="length", entry_point="__main__:LengthEnv")
    Experiment(cfg).run()


if __name__ == "__main__":
    main()
"""


def test_a_script_of_the_new_layout_trains(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "main_length.py").write_text(SCRIPT)
    write_jsonl(tmp_path / "rows.jsonl", [prompt_row("say something", "length")] * 4)
    settings = [
        "generator.n_samples_per_prompt=2",
        "generator.inference_engine.gpu_memory_utilization=0.7",
        "environment.skyrl_gym.length.scale=0.5",
        "trainer.algorithm.policy_loss_type=score_function",
    ]
    rows = Path("rows.jsonl")
    overrides = small_run(tmp_path / "outputs", *settings, model=tiny_model_path, data=rows, val_data=rows)
    run_python("main_length.py", *overrides, cwd=tmp_path)
    last = run_of(overrides).metrics[-1]
    assert (last["policy/clip_ratio"], last["reward/avg_raw_reward"] > 0) == (0.25, True)
