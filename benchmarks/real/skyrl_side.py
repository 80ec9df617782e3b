"""The child process of `make bench-real` that trains with SkyRL: `skyrl_side.py grpo|sft SEED MODEL FOLDER`."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_child import OnRequestExp, OnRequestSFTExp
from task import N_NEW, N_PROMPTS, N_SAMPLES, SFT_ROWS, reward

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config.cli import parse
from skyrl_train.config.supervised import SFT
from skyrl_train.entrypoints.main_base import parse_cli


class LargerNumber(BaseTextEnv):
    """An environment that scores one reply with `task.reward`."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self._answer = int(extras["answer"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the reply."""
        return BaseTextEnvStepOutput(observations=[], reward=reward(action, self._answer), done=True, metadata={})


def main() -> None:
    """Train one step for each request of the parent process."""
    method, seed, model, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    settings: dict[str, Any] = {
        "data.train_data": f"['{folder / 'train.jsonl'}']",
        "trainer.policy.model.path": model,
        "trainer.output_dir": folder / "outputs",
        "trainer.seed": seed,
        "trainer.train_batch_size": SFT_ROWS if method == "sft" else N_PROMPTS,
        "trainer.policy.optimizer_config.lr": 1e-5,
        "trainer.policy.optimizer_config.adam_betas": "[0.9,0.999]",
        "trainer.policy.optimizer_config.weight_decay": 0,
        "trainer.policy.optimizer_config.scheduler": "constant",
        "trainer.epochs": 1,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
    }
    if method == "sft":
        settings["trainer.micro_train_batch_size_per_gpu"] = "null"
        experiment = OnRequestSFTExp(parse([f"{key}={value}" for key, value in settings.items()], SFT))
    else:
        settings |= {
            "trainer.policy_mini_batch_size": N_PROMPTS,
            "trainer.algorithm.use_kl_loss": False,
            "generator.n_samples_per_prompt": N_SAMPLES,
            "generator.sampling_params.max_generate_length": N_NEW,
            "environment.env_class": "skyrl_side:LargerNumber",
            "environment.skyrl_gym.max_env_workers": 0,
        }
        experiment = OnRequestExp(parse_cli([f"{key}={value}" for key, value in settings.items()]))
    with suppress(KeyboardInterrupt):  # raised by a run that is stopped before its last step
        experiment.run()


if __name__ == "__main__":
    main()
