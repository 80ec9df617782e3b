"""The child process of `make bench-training` that trains with SkyRL: `skyrl_child.py WORKLOAD FOLDER [key=value …]`."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import Requests
from workloads import WORKLOADS, reward

from examples.catch.main_catch import register_catch
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.config.cli import parse
from skyrl_train.config.supervised import SFT
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.entrypoints.main_sft import SFTExp

FACTS = {
    "policy/policy_entropy": "entropy",
    "policy/grad_norm": "grad_norm",
    "reward/avg_raw_reward": "reward",
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
}


class PseudoRandomReward(BaseTextEnv):
    """A single-turn environment with the reward of `workloads.reward`."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the response."""
        return BaseTextEnvStepOutput(observations=[], reward=reward(action), done=True, metadata={})


class OnRequest(Callback):
    """A callback that starts a step when the parent process requests it, and reports the step."""

    def __init__(self) -> None:
        self.requests = Requests()

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.global_step:
            metrics = report.metrics
            parts = {
                name.removeprefix("timing/"): value for name, value in metrics.items() if name.startswith("timing/")
            }
            self.requests.report(parts, {fact: metrics[name] for name, fact in FACTS.items() if name in metrics})
        if not self.requests.wait():
            run.request_stop("the measurement is over")


class OnRequestExp(RLExperiment):
    """A run with `OnRequest` as its last callback."""

    def get_callbacks(self, *args: Any) -> list[Callback]:
        return [*super().get_callbacks(*args), OnRequest()]


class OnRequestSFTExp(SFTExp):
    """Supervised fine-tuning with `OnRequest` as its last callback."""

    def get_callbacks(self, *args: Any) -> list[Callback]:
        return [*super().get_callbacks(*args), OnRequest()]


def main() -> None:
    """Train one step for each request of the parent process."""
    register_catch()
    workload, folder = WORKLOADS[sys.argv[1]], Path(sys.argv[2])
    settings: dict[str, Any] = {
        "data.train_data": f"['{next(folder.glob('train.*'))}']",
        "trainer.policy.model.path": folder / "model",
        "trainer.output_dir": folder / "outputs",
        "trainer.train_batch_size": workload.n_prompts,
        "trainer.policy.optimizer_config.lr": 1e-5,
        "trainer.policy.model.lora.rank": workload.lora_rank,
        "trainer.epochs": 1000,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
    }
    if workload.is_sft:
        settings |= {
            "trainer.micro_train_batch_size_per_gpu": "null",
            "trainer.policy.optimizer_config.adam_betas": "[0.9,0.999]",
            "trainer.policy.optimizer_config.weight_decay": 0,
            "trainer.policy.optimizer_config.scheduler": "constant",
        }
        with suppress(KeyboardInterrupt):
            OnRequestSFTExp(parse([f"{key}={value}" for key, value in settings.items()] + sys.argv[3:], SFT)).run()
        return
    settings |= {
        "trainer.policy_mini_batch_size": workload.n_prompts,
        "trainer.algorithm.use_kl_loss": workload.kl > 0,
        "trainer.algorithm.kl_loss_coef": workload.kl,
        "generator.n_samples_per_prompt": workload.n_samples,
        "generator.max_turns": workload.n_turns,
        "generator.sampling_params.max_generate_length": workload.n_new,
        "generator.sampling_params.min_tokens": workload.n_new,
        "environment.skyrl_gym.max_env_workers": 0,
    }
    if workload.n_turns == 1:
        settings["environment.env_class"] = "skyrl_child:PseudoRandomReward"
    with suppress(KeyboardInterrupt):  # raised by a run that is stopped before its last step
        OnRequestExp(parse_cli([f"{key}={value}" for key, value in settings.items()] + sys.argv[3:])).run()


if __name__ == "__main__":
    main()
