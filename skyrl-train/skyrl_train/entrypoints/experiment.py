"""A training run, assembled from its configuration. Override a `get_*` method of `RLExperiment` to replace a part."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms import advantage_estimator, required_inputs
from skyrl_train.algorithms.inputs import FROM_GREEDY_ROLLOUTS
from skyrl_train.algorithms.rules import algorithm_warnings, check_algorithm
from skyrl_train.callbacks import (
    Callback,
    Checkpointing,
    Evaluation,
    Export,
    Logging,
    Reporting,
    Run,
    SavedConfig,
    StepReport,
    TrajectoryDump,
)
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.mixture import MixedPrompts
from skyrl_train.dataset.order import PromptOrder, ShuffledPrompts
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.dataset.rows import check_environments
from skyrl_train.entrypoints.base import Experiment, train
from skyrl_train.entrypoints.command import validate_cfg
from skyrl_train.entrypoints.engine import engine_sync, load_engine_model, new_engine, sync_options
from skyrl_train.entrypoints.load_learner import load_learner
from skyrl_train.entrypoints.memory_plan import warn_of_shortage
from skyrl_train.entrypoints.preflight import check_data
from skyrl_train.entrypoints.prompts import (
    check_rows,
    curriculum_callbacks,
    load_policy_tokenizer,
    open_eval_prompts,
    open_prompts,
)
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.generators.rewards import functions_of_batches
from skyrl_train.generators.source import BufferedRollouts, Rollouts
from skyrl_train.inference_engines.base import InferenceEngine, weight_folder
from skyrl_train.launch.launcher import Launcher
from skyrl_train.learner import Learner
from skyrl_train.models.loading import CRITIC_PATH, load_model
from skyrl_train.plan import RunPlan, limit_steps
from skyrl_train.remote_storage import RemoteStorage
from skyrl_train.timer import StepTimer
from skyrl_train.tracking import Tracking
from skyrl_train.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run from which its trainer is made."""

    launcher: Launcher
    learner: Learner
    engine: InferenceEngine
    generator: RolloutGenerator
    tracker: Tracking
    prompts: PromptOrder
    train_dataset: PromptDataset
    eval_dataset: PromptDataset | None
    curriculum: list[Callback]
    total_steps: int


class _AllocatedMemory(Callback):
    """A callback that releases the memory reserved for gradients and optimizer state after the first update.

    By then they are allocated, so an engine that replaces a lost engine already sees them as used memory.
    """

    def __init__(self, experiment: RLExperiment) -> None:
        self._experiment = experiment

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.trajectories:
            self._experiment._reserved_bytes = 0


class RLExperiment(Experiment):
    """One training run, assembled from its configuration."""

    trainer_class: type[Trainer] = Trainer
    """Set this to a subclass of `Trainer` to change a stage of the training step."""

    def __init__(self, cfg: SkyRLConfig | DictConfig, *, data_is_checked: bool = False) -> None:
        """Check the configuration and create the run folder; ConfigError lists every problem.

        Set `data_is_checked` if `preflight.check_data` has already checked all rows.
        """
        self.cfg = validate_cfg(cfg)
        self._data_is_checked = data_is_checked
        for sentence in algorithm_warnings(self.cfg):
            logger.warning(sentence)
        super().__init__(self.cfg)
        self._reserved_bytes = 0  # for gradients and optimizer state, which the first update allocates

    @asynccontextmanager
    async def playing(self, model: PreTrainedModel | None) -> AsyncIterator[tuple[InferenceEngine, RolloutGenerator]]:
        """Create an engine for the policy `model` and a generator that plays with it. Close both on exit.

        `model` is None if the policy is in other processes. Then the engine also runs in a separate process.
        """
        # A run or an engine that is killed during a weight sync leaves its files of weights.
        files = weight_folder(self.cfg)
        shutil.rmtree(files, ignore_errors=True)
        async with AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, files, ignore_errors=True)
            launcher = self._launcher
            if launcher is None or not self.cfg.generator.run_engines_locally:
                engine = self._make_engine(model)
            else:
                engine = await launcher.start_engine(self._make_engine, self.cfg.generator.engine_start_timeout_seconds)
            stack.push_async_callback(engine.close)
            generator = self.get_generator(self.cfg, self.tokenizer, self.engine_client(engine))
            stack.push_async_callback(generator.close)
            yield engine, generator

    def engine_client(self, engine: InferenceEngine) -> InferenceEngine:
        """Return the engine as `get_generator` receives it."""
        return engine

    @property
    def plan(self) -> RunPlan:
        """The plan of the run: which models and engines run on which devices."""
        return RunPlan(self.cfg, torch.cuda.is_available())

    def get_tokenizer(self, padding_side: str = "left") -> PreTrainedTokenizerBase:
        tokenizer = load_policy_tokenizer(self.cfg)
        tokenizer.padding_side = padding_side
        return tokenizer

    def get_train_dataset(self) -> PromptDataset:
        """Load the prompts to train on."""
        return open_prompts(self.cfg, self.tokenizer, "train")

    def get_eval_dataset(self) -> PromptDataset | None:
        """Load the prompts to evaluate on, or return None if there are no evaluations."""
        return None if self.cfg.trainer.eval_interval < 0 else open_eval_prompts(self.cfg, self.tokenizer)

    def get_model(self, path: str, key: str) -> PreTrainedModel:
        """Load the causal language model at `path`, the value of the configuration key `key`."""
        return self.load_language_model(path, key)

    def get_value_model(self, path: str) -> PreTrainedModel:
        """Load the critic's model."""
        return load_model(path, "critic", key=CRITIC_PATH, **self.loading_options(self.cfg.trainer.critic.model.dtype))

    def get_engine(self, model: PreTrainedModel | None) -> InferenceEngine:
        """Create the engine. `model` is the policy, or None for an engine with its own weights."""
        return new_engine(self.cfg, model, self.tokenizer, self._reserved_bytes, self._compute)

    def _make_engine(self, model: PreTrainedModel | None) -> InferenceEngine:
        """Create the engine. Without a `model`, an engine that needs one gets a new copy of the policy."""
        if model is None and self.plan.needs_engine_model:
            model = load_engine_model(self.cfg, self.get_model)
        return self.get_engine(model)

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> RolloutGenerator:
        """Create the generator that plays the rollouts."""
        return GymGenerator(cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer)

    def get_prompts(self, train_dataset: PromptDataset) -> PromptOrder:
        """Return the order in which training draws its prompts."""
        trainer, mixture = self.cfg.trainer, self.cfg.data.mixture
        if not mixture.is_used:
            return ShuffledPrompts(train_dataset, trainer.train_batch_size, trainer.seed)
        return MixedPrompts(
            train_dataset,
            trainer.train_batch_size,
            trainer.seed,
            mixture.weights,
            mixture.min_per_batch,
            resumes_weights=mixture.curriculum is not None,
        )

    def get_callbacks(
        self, eval_dataset: PromptDataset | None, generator: RolloutGenerator, tracker: Tracking
    ) -> list[Callback]:
        """Return the callbacks of a step, in order."""
        trainer, folder, chat = self.cfg.trainer, self.run_folder, ChatEncoder(self.tokenizer)
        evaluation = [] if eval_dataset is None else [Evaluation(eval_dataset, generator, folder, chat)]
        return [
            SavedConfig(folder),
            *evaluation,
            Logging(tracker),
            TrajectoryDump(folder, chat),
            Checkpointing(),
            Export(),
            Reporting(folder),
            RemoteStorage(folder, trainer.remote_trajectory_url),
        ]

    async def _run(self) -> None:
        cfg = self.cfg.trainer
        # Estimators, losses and reward functions may have been registered since __init__.
        check_algorithm(self.cfg)
        check_reward_functions(self.cfg)
        self.check_data()
        train_dataset, eval_dataset = self.get_train_dataset(), self.get_eval_dataset()
        datasets = [train_dataset] if eval_dataset is None else [train_dataset, eval_dataset]
        self.check_environments(datasets)
        prompts = self.get_prompts(train_dataset)
        data = (prompts, train_dataset, eval_dataset, curriculum_callbacks(self.cfg, prompts))
        total_steps = limit_steps(cfg, prompts.batches_per_epoch)
        if not self.replaces("get_model", "get_value_model"):
            longest = train_dataset.longest_prompt if isinstance(train_dataset, PromptDataset) else None
            warn_of_shortage(replace(self.plan, longest_prompt=longest))
        async with self.launching(self.plan, self.plan.roles, sync_options(self.cfg.generator)) as launcher:
            with (loading := StepTimer())("load"):
                learner = await load_learner(
                    self.cfg, launcher, self.tokenizer, self.get_model, self.get_value_model, total_steps
                )
            self._reserved_bytes = launcher.bytes_beside_engine(learner.update_bytes)
            async with self.playing(launcher.policy) as (engine, generator):
                with self.open_tracker() as tracker:
                    parts = RunParts(launcher, learner, engine, generator, tracker, *data, total_steps)
                    await train(self.new_trainer(parts), loading)

    def new_trainer(self, parts: RunParts) -> Trainer:
        """Create the trainer: an instance of `trainer_class`."""
        return self.trainer_class(self.cfg, **self.trainer_parts(parts, self.cfg))

    def trainer_parts(self, parts: RunParts, cfg: SkyRLConfig) -> dict[str, Any]:
        """Return the keyword arguments of a `Trainer`. `cfg` is the configuration of its rollout source."""
        callbacks = self.get_callbacks(parts.eval_dataset, parts.generator, parts.tracker)
        estimator = advantage_estimator(cfg.trainer.algorithm.advantage_estimator)
        options = {"with_greedy_rewards": bool(required_inputs(estimator) & FROM_GREEDY_ROLLOUTS)}
        if cfg.trainer.fully_async.enabled:
            source: Rollouts = BufferedRollouts(
                cfg, parts.generator, parts.prompts, total_steps=parts.total_steps, **options
            )
        else:
            source = Rollouts(cfg, parts.generator, parts.prompts, **options)
        return {
            "source": source,
            "learner": parts.learner,
            "sync_engines": engine_sync(
                self.plan, parts.launcher, parts.learner.policy, parts.engine, len(self.tokenizer)
            ),
            "total_steps": parts.total_steps,
            "pad_token_id": self.tokenizer.pad_token_id,
            "callbacks": [_AllocatedMemory(self), *parts.curriculum, *callbacks],
        }

    def check_data(self) -> None:
        """Check the rows of the data files before the tokenizer is loaded, unless a `get_*` method replaces them."""
        if not self._data_is_checked and not self.replaces("get_train_dataset", "get_eval_dataset", "get_generator"):
            self._data_is_checked = check_data(self.cfg, trains=self.trains)

    def check_environments(self, datasets: Sequence[PromptDataset]) -> None:
        """Check all rows, unless a custom generator replaces the environments. Lazy datasets also check each draw."""
        if self.replaces("get_generator"):
            return
        environment, max_turns = self.cfg.environment, self.cfg.generator.max_turns
        for dataset in datasets:
            if not dataset.is_checked:
                dataset.check_drawn = lambda row: check_environments([row], environment, max_turns, is_complete=False)
        if not self._data_is_checked:
            check_rows(self.cfg, datasets)


def check_reward_functions(cfg: SkyRLConfig) -> None:
    """Raise ConfigError if a reward function needs whole batches and training is asynchronous."""
    if cfg.trainer.fully_async.enabled and (names := functions_of_batches(cfg.generator)):
        raise ConfigError(
            f"generator.reward_functions={names[0]} compares the samples of a batch, but "
            "trainer.fully_async.enabled=true scores one prompt at a time; register it with level=group, "
            "or set trainer.fully_async.enabled=false"
        )
