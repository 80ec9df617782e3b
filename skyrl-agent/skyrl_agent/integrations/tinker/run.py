"""A training run with a Tinker service, on the machine that plays the rollouts.

Subclass `TinkerRun` to change the generator, checks, metrics or alerts, and `TinkerOptions` to add options:

    run_command(lambda: MyRun(parse_options(MyOptions, sys.argv[1:], "Train my agent")).run())

Reads TINKER_API_KEY and TINKER_BASE_URL. Rerun the command with the same `--run_name` to resume.
"""

import asyncio
import json
import logging
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Literal, cast

import tinker
from transformers import PreTrainedTokenizerBase

from skyrl_agent.integrations.tinker.data import training_data
from skyrl_agent.integrations.tinker.engine import TinkerEngine
from skyrl_agent.integrations.tinker.options import TinkerOptions
from skyrl_train.checkpoint import folder_lock, replace_text
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.dataset.rows import LocatedRow, check_environments
from skyrl_train.evaluate import evaluate
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.media.processing import is_vision_model
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.tracking import Tracking, create_run_folder, log_to_file
from skyrl_train.types import Trajectory

logger = logging.getLogger(__name__)

STATE = "tinker_state.json"
CLOSE_TIMEOUT_S = 10


class TinkerRun:
    """Base class for runs: rollouts with the sampling client, updates with the training client.

    Subclasses may override `get_generator`, `check_rows`, `step_metrics` and `alert`.
    """

    def __init__(self, options: TinkerOptions) -> None:
        """Check the configuration and create the run folder."""
        self.options = options
        self.cfg = options.config()
        self.run_folder = create_run_folder(options.output_dir, options.project_name, options.run_name)
        self._state_path = self.run_folder.path / STATE

    def run(self) -> None:
        """Train to the last step."""
        advice = "wait until it ends, or give this run another --run_name"
        with folder_lock(self.run_folder.path, advice), log_to_file(self.run_folder.train_log):
            asyncio.run(self._run())

    def get_generator(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase) -> RolloutGenerator:
        """Create the generator that plays the rollouts. The engine has only `info`, `generate` and `end_session`."""
        return GymGenerator(self.cfg.generator, self.cfg.environment.skyrl_gym, engine, tokenizer)

    def check_rows(self, rows: Iterable[LocatedRow]) -> None:
        """Raise ConfigError or DataError if the generator cannot play a row of a dataset."""
        check_environments(rows, self.cfg.environment, self.cfg.generator.max_turns)

    def step_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics of a step's rollouts."""
        rewards = training_reward_metrics(
            trajectories, self.options.n_samples_per_prompt, self.cfg.generator.success_reward
        )
        return rollout_metrics(trajectories) | rewards

    async def alert(self, step: int, metrics: dict[str, float]) -> None:
        """Report problems in the metrics of a step or of an evaluation. The default does nothing."""

    async def _run(self) -> None:
        options = self.options
        tokenizer = load_tokenizer(options.tokenizer or options.model_name)

        def open_prompts(path: str) -> PromptDataset:
            dataset = PromptDataset([path], tokenizer, options.max_input_length)
            self.check_rows(dataset.checked_rows())
            return dataset

        dataset = open_prompts(options.train_data)
        eval_dataset = open_prompts(options.eval_data) if options.eval_data else None
        prompts = ShuffledPrompts(dataset, options.batch_size, options.seed)
        state: dict[str, Any] = json.loads(self._state_path.read_text()) if self._state_path.exists() else {"step": 0}
        if state["step"]:
            prompts.load_state_dict(state["prompts"])
            logger.info("Resuming after step %d from %s", state["step"], state["path"])
        context_length = options.max_input_length + options.max_generate_length
        engine = TinkerEngine(context_length, reads_images=is_vision_model(tokenizer.name_or_path))
        generator = self.get_generator(cast(InferenceEngine, engine), tokenizer)  # it has what a generator calls
        names, folder = (options.project_name, options.run_name), self.run_folder.path
        async with self._training_client(state) as trainer:
            with Tracking(*names, options.logger.split(","), asdict(options), folder) as tracking:
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
                            saved = await trainer.save_state(f"{options.run_name}-{step:06d}", overwrite=True)
                            position = {"step": step, "path": saved.path, "prompts": prompts.state_dict()}
                            replace_text(self._state_path, json.dumps(position))
                    if eval_dataset is not None and state["step"] < options.max_steps:
                        engine.load(await trainer.save_weights_and_get_sampling_client(), options.max_steps)
                        final = await self._evaluate(eval_dataset, generator, tokenizer, options.max_steps)
                        tracking.log(final, options.max_steps)
                finally:
                    await generator.close()

    @asynccontextmanager
    async def _training_client(self, state: dict[str, Any]) -> AsyncIterator[tinker.TrainingClient]:
        """Open a session with a new or the saved adapter, and close it with the outcome of the block."""
        options, service = self.options, tinker.ServiceClient()
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
        self, prompts: ShuffledPrompts, generator: RolloutGenerator, trainer: tinker.TrainingClient, step: int
    ) -> dict[str, float]:
        """Play a batch, update the weights, and return metrics."""
        options, cfg = self.options, self.cfg
        started = time.perf_counter()
        requests = rollout_requests(prompts.next_batch(), options.n_samples_per_prompt, cfg.environment.env_class)
        sampling = SamplingParams.from_config(cfg.generator.sampling_params)
        trajectories = await generator.play(requests, sampling, BatchMetadata(step, "train", options.seed))
        rollout_s = time.perf_counter() - started
        data, metrics = training_data(trajectories, options.max_sequence_length)
        if data:
            adam = tinker.AdamParams(learning_rate=options.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
            gradient, update = trainer.forward_backward(data, "ppo"), trainer.optim_step(adam)
            await gradient
            await update
        else:
            logger.warning("Step %d: the rewards within each group are equal or unknown; nothing was trained", step)
        metrics |= self.step_metrics(trajectories) | generator.take_metrics()
        n_tokens = sum(t.n_response_tokens for t in trajectories)
        metrics |= {
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
        await self.alert(step, metrics)
        return metrics | {"time/train": time.perf_counter() - started - rollout_s}

    async def _evaluate(
        self, dataset: PromptDataset, generator: RolloutGenerator, tokenizer: PreTrainedTokenizerBase, step: int
    ) -> dict[str, float]:
        folder, chat = self.run_folder.evals(step), ChatEncoder(tokenizer)
        metrics, _ = await evaluate(dataset, generator, self.cfg, step, folder, chat)
        await self.alert(step, metrics)
        return metrics
