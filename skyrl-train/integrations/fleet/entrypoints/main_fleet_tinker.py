"""Train on Fleet tasks with a Tinker service, which holds the model:

    python -m integrations.fleet.entrypoints.main_fleet_tinker --train_data train.parquet --tasks_file tasks.json

Reads TINKER_API_KEY and TINKER_BASE_URL. Rollouts, context limits, rewards and metrics are those of `main_fleet`. Rerun
the command with the same `--run_name` to resume.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_type_hints

import tinker
from transformers import PreTrainedTokenizerBase

from integrations.fleet.entrypoints.main_fleet import register_fleet
from integrations.fleet.env import ENV_CLASS
from integrations.fleet.metrics import find_tool_errors, fleet_metrics, send_alert
from integrations.fleet.tinker_engine import TinkerEngine, training_data
from skyrl_train.checkpoint import folder_lock, replace_text
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.dataset.rows import TaskRow, check_environments
from skyrl_train.entrypoints.command import run_command
from skyrl_train.errors import ConfigError
from skyrl_train.evaluate import dump_evaluation, evaluate
from skyrl_train.generators.base import BatchMetadata, play, rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.tracking import RunFolder, Tracking, log_to_file
from skyrl_train.types import Trajectory

logger = logging.getLogger(__name__)

STATE = "tinker_state.json"
CLOSE_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions:
    """The command line. Names that `generator.*` has too mean the same.

    max_sequence_length: tokens of prompt and response together; longer sequences are truncated and not trained on.
    tokenizer: folder or name of the tokenizer; the model's by default.
    """

    train_data: str
    tasks_file: str
    eval_data: str = ""
    model_name: str = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    tokenizer: str = ""
    batch_size: int = 8
    eval_batch_size: int = 32
    learning_rate: float = 4e-5
    lora_rank: int = 16
    max_steps: int = 200
    max_turns: int = 50
    max_generate_length: int = 2048
    max_input_length: int = 30720
    max_sequence_length: int = 32768
    n_samples_per_prompt: int = 4
    eval_every: int = 20
    save_every: int = 10
    seed: int = 42
    ttl_seconds: int = 7200
    project_name: str = "fleet-tinker-grpo"
    run_name: str = "fleet_tinker"
    output_dir: str = "outputs"
    logger: str = "wandb"

    def __post_init__(self) -> None:
        """Raise ConfigError for a number that is not positive, or lengths that do not fit."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and field.name != "seed" and value <= 0:
                raise ConfigError(f"--{field.name}={value} must be above 0")
        if self.max_sequence_length < self.max_input_length:
            raise ConfigError(
                f"--max_sequence_length={self.max_sequence_length} must be at least --max_input_length="
                f"{self.max_input_length}, or every long rollout is left out of training"
            )

    def config(self) -> SkyRLConfig:
        """Return the configuration of the generator and of evaluations."""
        sampling = {"max_generate_length": self.max_generate_length, "temperature": 1.0, "stop": ["</tool_call>"]}
        return load_config(
            {
                "data": {"train_data": [self.train_data], "val_data": [self.eval_data] if self.eval_data else []},
                "trainer": {
                    "project_name": self.project_name,
                    "run_name": self.run_name,
                    "output_dir": self.output_dir,
                    "seed": self.seed,
                    "eval_interval": self.eval_every if self.eval_data else -1,
                    "train_batch_size": self.batch_size,
                    "policy_mini_batch_size": self.batch_size,
                    "eval_batch_size": self.eval_batch_size,
                    "max_prompt_length": self.max_input_length,
                },
                "generator": {
                    "n_samples_per_prompt": self.n_samples_per_prompt,
                    "max_turns": self.max_turns,
                    "max_input_length": self.max_input_length,
                    "sampling_params": sampling,
                    "eval_sampling_params": sampling,
                },
                "environment": {
                    "env_class": ENV_CLASS,
                    "skyrl_gym": {ENV_CLASS: {"tasks_file": self.tasks_file, "ttl_seconds": self.ttl_seconds}},
                },
            }
        )


class TinkerRun:
    """A run: rollouts with the sampling client, updates with the training client."""

    def __init__(self, options: TinkerOptions) -> None:
        self._options = options
        self._cfg = options.config()
        self._folder = RunFolder.create(options.output_dir, options.project_name, options.run_name)
        self._state_path = self._folder.path / STATE

    def run(self) -> None:
        """Train to the last step."""
        advice = "wait until it ends, or give this run another --run_name"
        with folder_lock(self._folder.path, advice), log_to_file(self._folder.train_log):
            asyncio.run(self._run())

    async def _run(self) -> None:
        options, cfg = self._options, self._cfg
        tokenizer = load_tokenizer(options.tokenizer or options.model_name)
        dataset = PromptDataset([options.train_data], tokenizer, options.max_input_length)
        eval_dataset = (
            PromptDataset([options.eval_data], tokenizer, options.max_input_length) if options.eval_data else None
        )
        for rows in filter(None, (dataset, eval_dataset)):
            tasks = (TaskRow(f"row {row.uid}", row.env_class, row.env_extras) for row in rows)
            check_environments(tasks, cfg.environment, options.max_turns)
        prompts = ShuffledPrompts(dataset, options.batch_size, options.seed)
        state: dict[str, Any] = {"step": 0}
        if self._state_path.exists():
            state = json.loads(self._state_path.read_text())
        if state["step"]:
            prompts.load_state_dict(state["prompts"])
            logger.info("Resuming after step %d from %s", state["step"], state["path"])
        engine = TinkerEngine(options.max_input_length + options.max_generate_length)
        generator = SkyRLGymGenerator(
            cfg.generator,
            cfg.environment.skyrl_gym,
            cast(InferenceEngine, engine),  # the part that a generator calls
            tokenizer,
        )
        backends = options.logger.split(",")
        async with self._training_client(state) as trainer:
            with Tracking(
                options.project_name, options.run_name, backends, asdict(options), self._folder.path
            ) as tracking:
                tracking.truncate_after(state["step"] or -1)
                try:
                    for step in range(state["step"] + 1, options.max_steps + 1):
                        started = time.perf_counter()
                        engine.load(await trainer.save_weights_and_get_sampling_client(), step - 1)
                        metrics: dict[str, float] = {}
                        if eval_dataset is not None and (step - 1) % options.eval_every == 0:
                            metrics |= await self._evaluate(eval_dataset, generator, tokenizer, step - 1)
                        metrics |= await self._step(prompts, generator, trainer, step)
                        metrics["time/total"] = time.perf_counter() - started
                        tracking.log(metrics, step)
                        if step % options.save_every == 0 or step == options.max_steps:
                            await self._save(trainer, prompts, step)
                    if eval_dataset is not None and state["step"] < options.max_steps:
                        engine.load(await trainer.save_weights_and_get_sampling_client(), options.max_steps)
                        final = await self._evaluate(eval_dataset, generator, tokenizer, options.max_steps)
                        tracking.log(final, options.max_steps)
                finally:
                    await generator.close()

    @asynccontextmanager
    async def _training_client(self, state: dict[str, Any]) -> AsyncIterator[tinker.TrainingClient]:
        """Open a session with a new adapter, or with the saved one; finish it with the outcome of the block."""
        options, service = self._options, tinker.ServiceClient()
        outcome: Literal["success", "errored", "interrupted"] = "errored"
        try:
            if state["step"]:
                yield await service.create_training_client_from_state_with_optimizer(state["path"])
            else:
                yield await service.create_lora_training_client(
                    options.model_name, rank=options.lora_rank, seed=options.seed
                )
            outcome = "success"
        except (asyncio.CancelledError, KeyboardInterrupt):
            outcome = "interrupted"
            raise
        finally:
            try:
                await asyncio.wait_for(service.close(outcome), CLOSE_TIMEOUT_S)
            except (tinker.TinkerError, TimeoutError) as error:
                logger.warning("The session on the Tinker service was not finished: %s", error or "timed out")

    async def _step(
        self, prompts: ShuffledPrompts, generator: SkyRLGymGenerator, trainer: tinker.TrainingClient, step: int
    ) -> dict[str, float]:
        """Play a batch and update the weights; return the metrics."""
        options, cfg = self._options, self._cfg
        started = time.perf_counter()
        n_samples = options.n_samples_per_prompt
        requests = rollout_requests(prompts.next_batch(), n_samples, ENV_CLASS)
        sampling = SamplingParams.from_config(cfg.generator.sampling_params)
        trajectories = await play(generator, requests, sampling, BatchMetadata(step, "train", options.seed))
        rollout_s = time.perf_counter() - started
        data, metrics = training_data(trajectories, options.max_sequence_length)
        if data:
            await self._update(trainer, data)
        else:
            logger.warning("Step %d: the rewards within each group are equal or unknown; nothing was trained", step)
        metrics |= rollout_metrics(trajectories) | training_reward_metrics(trajectories, n_samples)
        metrics |= fleet_metrics(trajectories, n_samples) | speed_metrics(trajectories, rollout_s)
        await self._alert(step, metrics)
        return metrics | {"time/train": time.perf_counter() - started - rollout_s}

    async def _update(self, trainer: tinker.TrainingClient, data: list[tinker.Datum]) -> None:
        adam = tinker.AdamParams(learning_rate=self._options.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
        gradient = trainer.forward_backward(data, "ppo")
        update = trainer.optim_step(adam)
        await gradient
        await update

    async def _evaluate(
        self, dataset: PromptDataset, generator: SkyRLGymGenerator, tokenizer: PreTrainedTokenizerBase, step: int
    ) -> dict[str, float]:
        metrics, trajectories = await evaluate(dataset, generator, self._cfg, step)
        dump_evaluation(self._folder.evals(step), trajectories, metrics, ChatEncoder(tokenizer))
        await self._alert(step, metrics)
        return metrics

    async def _alert(self, step: int, metrics: dict[str, float]) -> None:
        """Report failing tools in the log and to Slack."""
        if problems := find_tool_errors(metrics):
            logger.warning("Step %d: %s", step, "; ".join(problems))
            await send_alert(f"{self._options.run_name}, step {step}: {'; '.join(problems)}")

    async def _save(self, trainer: tinker.TrainingClient, prompts: ShuffledPrompts, step: int) -> None:
        """Save weights and optimizer on the service, then the position of the run."""
        name = f"{self._options.run_name}-{step:06d}"
        saved = await trainer.save_state(name, overwrite=True)
        replace_text(self._state_path, json.dumps({"step": step, "path": saved.path, "prompts": prompts.state_dict()}))


def speed_metrics(trajectories: Sequence[Trajectory], rollout_s: float) -> dict[str, float]:
    """Return `time/rollout`, `throughput/*`, and `rollout/*_duration` in seconds."""
    n_tokens = sum(t.n_response_tokens for t in trajectories)
    metrics = {
        "time/rollout": rollout_s,
        "throughput/tokens_total": float(n_tokens),
        "throughput/tokens_per_sec_effective": n_tokens / max(rollout_s, 1e-9),
    }
    if durations := [sum(t.timing.values()) for t in trajectories if t.is_valid]:
        metrics |= {
            "rollout/avg_duration": statistics.fmean(durations),
            "rollout/max_duration": max(durations),
            "rollout/min_duration": min(durations),
        }
    return metrics


def parse_options(argv: Sequence[str] | None) -> TinkerOptions:
    """Parse the command line; ConfigError for values that do not fit."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(":")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    types = get_type_hints(TinkerOptions)
    for field in fields(TinkerOptions):
        required = field.name in ("train_data", "tasks_file")
        default = None if required else field.default
        parser.add_argument(
            f"--{field.name}", type=types[field.name], required=required, default=default, help=" ", metavar="VALUE"
        )
    return TinkerOptions(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    register_fleet()
    run_command(lambda: TinkerRun(parse_options(argv)).run())


if __name__ == "__main__":
    main()
