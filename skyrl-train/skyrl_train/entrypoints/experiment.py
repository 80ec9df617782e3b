"""A training run, assembled from its configuration. Override a `get_*` method of `RLExperiment` to replace a part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints.base import Experiment, train
from skyrl_train.entrypoints.command import validate_cfg
from skyrl_train.entrypoints.engine import delete_weight_files, engine_sync, new_engine, sync_options
from skyrl_train.entrypoints.load_models import load_causal_model, load_critic_model, load_learner, load_policy_copy
from skyrl_train.entrypoints.parts import (
    RunParts,
    check_functions,
    curriculum_callbacks,
    prompt_order,
    rollout_source,
    standard_callbacks,
    warn_of_functions,
)
from skyrl_train.entrypoints.plan import check_memory
from skyrl_train.entrypoints.preflight import check_data
from skyrl_train.entrypoints.prompts import (
    check_dataset_rows,
    load_policy_tokenizer,
    open_eval_prompts,
    open_train_prompts,
)
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.launch.launcher import Launcher, started
from skyrl_train.plan import RunPlan, limit_steps
from skyrl_train.tracking import Tracking
from skyrl_train.trainer import Trainer
from skyrl_train.types.specs import Role


class _AllocatedMemory(Callback):
    """A callback that ends the reservation of memory for gradients and moments after the first update.

    From then on they are allocated, so an engine that replaces a lost engine sees them in the memory that is taken.
    """

    def __init__(self, experiment: RLExperiment) -> None:
        self._experiment = experiment

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.trajectories:
            self._experiment._reserved_bytes = 0


class RLExperiment(Experiment):
    """One training run, assembled from its configuration."""

    is_stock = True

    trainer_class: type[Trainer] = Trainer
    """Set this to a subclass of `Trainer` to change a stage of the training step."""

    def __init__(self, cfg: SkyRLConfig | DictConfig, *, data_is_checked: bool = False) -> None:
        """Check the configuration and create the run folder; ConfigError lists every problem.

        With `data_is_checked`, `preflight.check_data` has checked all rows.
        """
        self.cfg = validate_cfg(cfg)
        self._data_is_checked = data_is_checked
        warn_of_functions(self.cfg)
        super().__init__(self.cfg)
        self._reserved_bytes = 0  # for gradients and optimizer state, which the first update allocates
        self._launcher: Launcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes need to load models and make the engine."""
        return super().__getstate__() | {"_launcher": None}

    @asynccontextmanager
    async def playing(self, model: PreTrainedModel | None) -> AsyncIterator[tuple[InferenceEngine, RolloutGenerator]]:
        """Create an engine for the policy `model` and a generator that plays with it; close both at the end.

        `model` is None if the policy is in other processes. Then the engine has a process of its own, too.
        """
        delete_weight_files(self.cfg)
        async with AsyncExitStack() as stack:
            stack.callback(delete_weight_files, self.cfg)  # of engines that were killed
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

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of `get_tokenizer`."""
        return self.get_tokenizer()

    def get_tokenizer(self, padding_side: str = "left") -> PreTrainedTokenizerBase:
        """Load the policy's tokenizer, with the configured chat template."""
        tokenizer = load_policy_tokenizer(self.cfg)
        tokenizer.padding_side = padding_side
        return tokenizer

    def get_train_dataset(self) -> PromptDataset:
        """Load the prompts to train on."""
        return open_train_prompts(self.cfg, self.tokenizer)

    def get_eval_dataset(self) -> PromptDataset | None:
        """Load the prompts to evaluate on; None without evaluations."""
        return None if self.cfg.trainer.eval_interval < 0 else open_eval_prompts(self.cfg, self.tokenizer)

    def get_model(self, path: str, key: str) -> PreTrainedModel:
        """Load the causal language model at `path`, the value of the configuration key `key`."""
        return load_causal_model(self.cfg, path, key)

    def get_value_model(self, path: str) -> PreTrainedModel:
        """Load the critic's model."""
        return load_critic_model(self.cfg, path)

    def get_engine(self, model: PreTrainedModel | None) -> InferenceEngine:
        """Create the engine that samples from the policy `model`; None if it has weights of its own."""
        return new_engine(self.cfg, model, self.tokenizer, self._reserved_bytes, self._compute)

    def _make_engine(self, model: PreTrainedModel | None) -> InferenceEngine:
        """Create the engine for the policy `model`; without it, for a new copy with its adapter if it needs one."""
        if model is None and self.plan.engine.needs_model:
            model = load_policy_copy(self.cfg, self.get_model)
        return self.get_engine(model)

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> RolloutGenerator:
        """Create the generator that plays the rollouts."""
        return GymGenerator(cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer)

    def get_prompts(self, train_dataset: PromptDataset) -> PromptOrder:
        """Return the order in which training draws its prompts."""
        return prompt_order(self.cfg, train_dataset)

    def get_callbacks(
        self, eval_dataset: PromptDataset | None, generator: RolloutGenerator, tracker: Tracking
    ) -> list[Callback]:
        """Return the callbacks of a step, in order."""
        return standard_callbacks(self.cfg, self.run_folder, self.tokenizer, eval_dataset, generator, tracker)

    async def _run(self) -> None:
        cfg = self.cfg.trainer
        check_functions(self.cfg)  # they may have been registered since __init__
        self.check_data()
        train_dataset, eval_dataset = self.get_train_dataset(), self.get_eval_dataset()
        datasets = [train_dataset] if eval_dataset is None else [train_dataset, eval_dataset]
        self.check_environments(datasets)
        prompts = self.get_prompts(train_dataset)
        curriculum = curriculum_callbacks(self.cfg, prompts)
        total_steps = limit_steps(cfg, prompts.batches_per_epoch)
        if not self.replaces("get_model", "get_value_model"):
            check_memory(cfg, self.plan.forecast_memory())
        async with self.launching(self.plan.roles) as launcher:
            learner = await load_learner(
                self.cfg, launcher, self.tokenizer, self.get_model, self.get_value_model, total_steps
            )
            self._reserved_bytes = launcher.bytes_beside_engine(learner.checkpoint_bytes)
            async with self.playing(launcher.policy) as (engine, generator):
                with self.open_tracker() as tracker:
                    parts = RunParts(
                        launcher,
                        learner,
                        engine,
                        generator,
                        tracker,
                        prompts,
                        train_dataset,
                        eval_dataset,
                        curriculum,
                        total_steps,
                    )
                    await train(self.new_trainer(parts))

    def new_trainer(self, parts: RunParts) -> Trainer:
        """Create the trainer: an instance of `trainer_class`."""
        return self.trainer_class(self.cfg, **self.trainer_parts(parts, self.cfg))

    def trainer_parts(self, parts: RunParts, source_cfg: SkyRLConfig) -> dict[str, Any]:
        """Return the keyword arguments of a `Trainer`. Its source of rollouts reads `source_cfg`."""
        callbacks = self.get_callbacks(parts.eval_dataset, parts.generator, parts.tracker)
        return {
            "source": rollout_source(source_cfg, parts),
            "learner": parts.learner,
            "sync_engines": engine_sync(
                self.plan, parts.launcher, parts.learner.policy, parts.engine, len(self.tokenizer)
            ),
            "total_steps": parts.total_steps,
            "pad_token_id": self.tokenizer.pad_token_id,
            "callbacks": [_AllocatedMemory(self), *parts.curriculum, *callbacks],
        }

    @asynccontextmanager
    async def launching(self, roles: Sequence[Role]) -> AsyncIterator[Launcher]:
        """Start the processes of the models in `roles` and of the engines, and end them at the end."""
        plan = self.plan
        launcher = self.new_launcher(
            roles,
            sync_options(self.cfg.generator),
            n_engines=plan.engine.n_local,
            engine_size=plan.engine.n_devices,
            servers=plan.engine.receiving_servers,
            offloads_idle=plan.offloads_idle,
            has_engine_process=self.trains and plan.engine.has_process,
        )
        try:
            async with started(launcher) as self._launcher:
                yield launcher
        finally:
            self._launcher = None

    def check_data(self) -> None:
        """Check the rows of the data files before the tokenizer is loaded, unless a `get_*` method replaces them."""
        if not self._data_is_checked and not self.replaces("get_train_dataset", "get_eval_dataset", "get_generator"):
            self._data_is_checked = check_data(self.cfg, trains=self.trains)

    def check_environments(self, datasets: Sequence[PromptDataset]) -> None:
        """Check all rows, unless a custom generator replaces the environments. Lazy datasets also check each row when
        drawn.
        """
        if self.replaces("get_generator"):
            return
        check_dataset_rows(self.cfg, datasets, is_checked=self._data_is_checked)
