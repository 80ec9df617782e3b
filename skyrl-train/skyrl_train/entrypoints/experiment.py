"""A training run, assembled from its configuration. Override a `get_*` method of `RLExperiment` to replace a part."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.error import InvalidSpec
from skyrl_train.algorithms import advantage_estimator, required_inputs
from skyrl_train.algorithms.contract import resolve_policy_loss
from skyrl_train.algorithms.inputs import FROM_GREEDY_ROLLOUTS
from skyrl_train.algorithms.objectives import Objective, PolicyObjective, ValueObjective
from skyrl_train.algorithms.registry import AdvantageEstimator
from skyrl_train.algorithms.rules import ALGORITHM_RULES, ALGORITHM_WARNINGS, reads_reference
from skyrl_train.callbacks import (
    Callback,
    Checkpointing,
    Curriculum,
    CurriculumStep,
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
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.validation import find_problems
from skyrl_train.dataset.custom import CustomDataset
from skyrl_train.dataset.mixture import MixedPrompts
from skyrl_train.dataset.order import PromptOrder, ShuffledPrompts
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.dataset.rows import check_environments
from skyrl_train.entrypoints.base import Experiment, train
from skyrl_train.entrypoints.command import validate_cfg
from skyrl_train.entrypoints.engine import (
    delete_weight_files,
    new_engine,
    sync_options,
    sync_tolerance,
)
from skyrl_train.entrypoints.plan import check_memory
from skyrl_train.entrypoints.preflight import check_data
from skyrl_train.entrypoints.prompts import check_rows, load_policy_tokenizer, open_prompts
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.buffered import BufferedRollouts
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.generators.rewards import functions_of_batches
from skyrl_train.generators.source import LockstepRollouts, Rollouts
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.launch.launcher import Launcher, started
from skyrl_train.launch.paused_sync import PausedSync
from skyrl_train.launch.specs import model_spec, optimizer_spec
from skyrl_train.launch.weight_check import CheckedSync
from skyrl_train.learner import Learner
from skyrl_train.models.loading import (
    CRITIC_PATH,
    POLICY_PATH,
    REF_PATH,
    check_same_vocabulary,
    check_vocabulary_size,
    default_device,
    load_model,
    load_value_model,
)
from skyrl_train.models.lora import add_adapter
from skyrl_train.plan import RunPlan
from skyrl_train.plan.forecast import limit_steps
from skyrl_train.remote_storage import RemoteStorage
from skyrl_train.tracking import Tracking
from skyrl_train.trainer import SyncEngines, Trainer
from skyrl_train.types.specs import LoraSpec, OptimizerSpec, Role, lora_spec
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)


class _AllocatedMemory(Callback):
    """A callback that ends the reservation of memory for gradients and moments: an engine that replaces another one
    after the first update finds them allocated.
    """

    def __init__(self, experiment: RLExperiment) -> None:
        self._experiment = experiment

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.trajectories:
            self._experiment._reserved_bytes = 0


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run has opened when it creates its trainer."""

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


class RLExperiment(Experiment):
    """One training run, assembled from its configuration."""

    is_stock: ClassVar[bool] = True
    """Set on the classes whose parts are those of the configuration. What other classes override is checked less."""

    trainer_class: type[Trainer] = Trainer
    """Set this to a subclass of `Trainer` to change a stage of the training step."""

    def __init__(self, cfg: SkyRLConfig | DictConfig, *, data_is_checked: bool = False) -> None:
        """Check the configuration and create the run folder; ConfigError lists every problem.

        With `data_is_checked`, `preflight.check_data` has checked all rows.
        """
        self.cfg = validate_cfg(cfg)
        self._data_is_checked = data_is_checked
        for sentence in find_problems(self.cfg, ALGORITHM_WARNINGS):
            logger.warning(sentence)
        super().__init__(self.cfg)
        self._reserved_bytes = 0  # for gradients and optimizer state, which the first update allocates
        self._launcher: Launcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes need to load models and make the engine."""
        return super().__getstate__() | {"_launcher": None}

    @asynccontextmanager
    async def playing(self, model: PreTrainedModel | None) -> AsyncIterator[tuple[InferenceEngine, RolloutGenerator]]:
        """Create an engine for the policy `model` and a generator that plays with it; close both at the end.

        `model` is None if the policy is in other processes; the engine is then in another one.
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
        """What runs where."""
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
        if self.cfg.data.custom_cls.path is not None:
            return CustomDataset(self.cfg, self.tokenizer, "train")
        return self._open_prompts(self.cfg.data.train_data, self.cfg.data.max_checked_rows)

    def get_eval_dataset(self) -> PromptDataset | None:
        """Load the prompts to evaluate on; None without evaluations."""
        if self.cfg.trainer.eval_interval < 0:
            return None
        if self.cfg.data.custom_cls.path is not None:
            return CustomDataset(self.cfg, self.tokenizer, "validation")
        if not self.cfg.data.val_data:
            return None
        return self._open_prompts(self.cfg.data.val_data)

    def _open_prompts(self, sources: list[str], max_checked_rows: int | None = None) -> PromptDataset:
        """Open prompts, and filter them as the generator will render them."""
        return open_prompts(self.cfg, self.tokenizer, sources, max_checked_rows)

    def get_model(self, path: str, key: str) -> PreTrainedModel:
        """Load the causal language model at `path`, the value of the configuration key `key`."""
        return load_model(
            path,
            dtype=getattr(torch, self.cfg.trainer.policy.model.dtype),
            device=default_device(),
            gradient_checkpointing=self.cfg.trainer.gradient_checkpointing,
            key=key,
        )

    def get_value_model(self, path: str) -> PreTrainedModel:
        """Load the critic's model."""
        return load_value_model(
            path,
            dtype=getattr(torch, self.cfg.trainer.critic.model.dtype),
            device=default_device(),
            gradient_checkpointing=self.cfg.trainer.gradient_checkpointing,
        )

    def get_engine(self, model: PreTrainedModel | None) -> InferenceEngine:
        """Create the engine that samples from the policy `model`; None if it has weights of its own."""
        return new_engine(self.cfg, model, self.tokenizer, self._reserved_bytes, self._compute)

    def _make_engine(self, model: PreTrainedModel | None) -> InferenceEngine:
        """Create the engine for the policy `model`; without it, for a new copy with its adapter if it needs one."""
        if model is None and self.plan.engine.needs_model:
            cfg = self.cfg.trainer.policy.model
            model = self.get_model(cfg.path, POLICY_PATH)
            lora = lora_spec(cfg, "trainer.policy.model.lora", self.cfg.trainer.seed)
            if lora is not None:
                add_adapter(model, lora)
        return self.get_engine(model)

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> RolloutGenerator:
        """Create the generator that plays the rollouts."""
        return GymGenerator(cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer)

    def get_prompts(self, train_dataset: PromptDataset) -> PromptOrder:
        """Return the order in which training draws its prompts."""
        cfg, mixture = self.cfg.trainer, self.cfg.data.mixture
        if not mixture.is_used:
            return ShuffledPrompts(train_dataset, cfg.train_batch_size, cfg.seed)
        return MixedPrompts(
            train_dataset,
            cfg.train_batch_size,
            cfg.seed,
            mixture.weights,
            mixture.min_per_batch,
            resumes_weights=mixture.curriculum is not None,
        )

    def get_callbacks(
        self, eval_dataset: PromptDataset | None, generator: RolloutGenerator, tracker: Tracking
    ) -> list[Callback]:
        """Return the callbacks of a step, in order."""
        chat = ChatEncoder(self.tokenizer)
        callbacks: list[Callback] = []
        if eval_dataset is not None:
            callbacks.append(Evaluation(eval_dataset, generator, self.run_folder, chat))
        callbacks.append(Logging(tracker))
        if self.cfg.trainer.dump_trajectories:
            callbacks.append(TrajectoryDump(self.run_folder, chat))
        return [
            SavedConfig(self.run_folder),
            *callbacks,
            Checkpointing(),
            Export(),
            Reporting(self.run_folder),
            RemoteStorage(self.run_folder, self.cfg.trainer.remote_trajectory_url),
        ]

    async def _run(self) -> None:
        cfg = self.cfg.trainer
        estimator = advantage_estimator(cfg.algorithm.advantage_estimator)
        objective = PolicyObjective(resolve_policy_loss(cfg.algorithm), cfg.algorithm)
        raise_problems(find_problems(self.cfg, ALGORITHM_RULES))  # functions may have been registered since __init__
        self.check_reward_functions()
        self.check_data()
        train_dataset, eval_dataset = self.get_train_dataset(), self.get_eval_dataset()
        datasets = [train_dataset] if eval_dataset is None else [train_dataset, eval_dataset]
        self.check_environments(datasets)
        prompts = self.get_prompts(train_dataset)
        curriculum = self._curriculum(prompts)
        total_steps = limit_steps(cfg, prompts.batches_per_epoch)
        if not self.replaces("get_model", "get_value_model"):
            check_memory(cfg, self.plan.forecast_memory())
        async with self.launching(self.plan.roles) as launcher:
            learner = await self._load_models(launcher, estimator, objective, total_steps)
            self._reserved_bytes = launcher.bytes_beside_engine(await learner.checkpoint_bytes())
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
            "source": self._new_source(parts, source_cfg),
            "learner": parts.learner,
            "sync_engines": self._engine_sync(parts.launcher, parts.learner.policy, parts.engine),
            "total_steps": parts.total_steps,
            "pad_token_id": self.tokenizer.pad_token_id,
            "callbacks": [_AllocatedMemory(self), *parts.curriculum, *callbacks],
        }

    def check_reward_functions(self) -> None:
        """Raise ConfigError for a reward function of whole batches, which asynchronous training does not have."""
        if self.cfg.trainer.fully_async.enabled and (names := functions_of_batches(self.cfg.generator)):
            raise ConfigError(
                f"generator.reward_functions={names[0]} compares the samples of a batch, and "
                "trainer.fully_async.enabled=true scores those of one prompt at a time; register it with level=group, "
                "or set trainer.fully_async.enabled=false"
            )

    def _new_source(self, parts: RunParts, cfg: SkyRLConfig) -> Rollouts:
        estimator = advantage_estimator(cfg.trainer.algorithm.advantage_estimator)
        greedy = bool(required_inputs(estimator) & FROM_GREEDY_ROLLOUTS)
        if cfg.trainer.fully_async.enabled:
            return BufferedRollouts(
                cfg, parts.generator, parts.prompts, total_steps=parts.total_steps, with_greedy_rewards=greedy
            )
        return LockstepRollouts(cfg, parts.generator, parts.prompts, with_greedy_rewards=greedy)

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

    def _engine_sync(self, launcher: Launcher, policy: WorkerGroup, engine: InferenceEngine) -> SyncEngines:
        """Return the function that sends the policy's weights to the engine, with the check that is configured."""
        cfg, dtype, settings = self.cfg, engine.info.weight_dtype, self.cfg.trainer.fully_async
        sync = launcher.weight_sync(policy, {"the engine": engine}, self.plan.sync_kind, dtype)
        paused = PausedSync(sync, engine, policy) if settings.enabled else None
        if isinstance(engine, EngineClient):
            if paused is not None and settings.in_flight_weight_updates:
                engine.follow(sync, paused.is_current)
            else:  # the next sync waits for rollouts, which must not wait for it
                engine.follow(sync)
        is_copied = launcher.policy is None or not self.plan.engine.needs_model
        tolerance = sync_tolerance(cfg, launcher.device, dtype, is_copied=is_copied)
        if tolerance is None:
            return paused or sync
        # later, the sampled tokens would wait for rollouts in progress
        once = settings.continues_rollouts and cfg.generator.weight_sync_check == "auto"
        return CheckedSync(paused or sync, engine, policy, len(self.tokenizer), tolerance, once=once)

    async def _load_models(
        self, launcher: Launcher, estimator: AdvantageEstimator, objective: PolicyObjective, total_steps: int
    ) -> Learner:
        """Load the policy, and the critic and the reference if the configuration uses them."""
        cfg, tokenizer = self.cfg.trainer, self.tokenizer
        n_prompts = total_steps * cfg.train_batch_size * cfg.update_epochs_per_batch

        async def load(
            role: Role,
            model: Callable[[], PreTrainedModel],
            objective: Objective | None = None,
            optimizer: OptimizerSpec | None = None,
            lora: LoraSpec | None = None,
        ) -> WorkerGroup:
            spec = model_spec(
                role,
                model,
                tokenizer.save_pretrained,
                cfg,
                cfg.algorithm.temperature,
                optimizer=optimizer,
                lora=lora,
                sharding={"policy": cfg.policy, "critic": cfg.critic, "ref": cfg.ref}[role],
                eos_ids=[tokenizer.eos_token_id, *self.cfg.generator.sampling_params.stop_token_ids],
            )
            return await launcher.load(spec, objective)

        policy = await load(
            "policy",
            partial(self.get_model, cfg.policy.model.path, POLICY_PATH),
            objective,
            optimizer_spec(
                cfg.policy.optimizer_config, "trainer.policy.optimizer_config", n_prompts // cfg.policy_mini_batch_size
            ),
            lora_spec(cfg.policy.model, "trainer.policy.model.lora", cfg.seed),
        )
        n_embeddings = await policy.n_embeddings()
        critic, ref, reference_sync = None, None, None
        if cfg.critic.model.path is not None:
            check_same_vocabulary(cfg.critic.model.path, CRITIC_PATH, tokenizer)
            critic = await load(
                "critic",
                partial(self.get_value_model, cfg.critic.model.path),
                ValueObjective(cfg.algorithm.value_clip),
                optimizer_spec(
                    cfg.critic.optimizer_config,
                    "trainer.critic.optimizer_config",
                    n_prompts // cfg.critic_mini_batch_size,
                ),
                lora_spec(cfg.critic.model, "trainer.critic.model.lora", cfg.seed),
            )
            check_vocabulary_size(await critic.n_embeddings(), CRITIC_PATH, cfg.critic.model.path, n_embeddings)
        if reads_reference(cfg.algorithm) and cfg.policy_is_reference:
            ref = policy
        elif reads_reference(cfg.algorithm):
            check_same_vocabulary(cfg.ref.model.path, REF_PATH, tokenizer)
            lora = lora_spec(cfg.policy.model, "trainer.policy.model.lora", cfg.seed)
            lora = lora if cfg.ref.shares_adapter_with(cfg.policy.model) else None
            ref = await load("ref", partial(self.get_model, cfg.ref.model.path, REF_PATH), lora=lora)
            check_vocabulary_size(await ref.n_embeddings(), REF_PATH, cfg.ref.model.path, n_embeddings)
            if cfg.update_ref_every_epoch:
                if await policy.tensor_specs() != await ref.tensor_specs():
                    raise ConfigError(
                        "trainer.update_ref_every_epoch=true makes the policy the reference, and "
                        "trainer.ref.model.path has another architecture; set trainer.update_ref_every_epoch=false, "
                        "or omit trainer.ref.model.path"
                    )
                reference_sync = launcher.weight_sync(policy, {"the reference": ref})
        return Learner(cfg, estimator, policy=policy, critic=critic, ref=ref, reference_sync=reference_sync)

    def _curriculum(self, prompts: PromptOrder) -> list[Callback]:
        """Return the callback of `data.mixture.curriculum`, if it is set; ConfigError if it names no function."""
        name = self.cfg.data.mixture.curriculum
        if name is None or not isinstance(prompts, MixedPrompts):
            return []
        try:
            curriculum: Curriculum = load_attribute(name)
        except (ImportError, InvalidSpec) as error:
            raise ConfigError(f"data.mixture.curriculum={name}: {error}") from error
        if not callable(curriculum):
            raise ConfigError(f"data.mixture.curriculum={name} is {curriculum!r}; it must be a function")
        return [CurriculumStep(prompts, curriculum)]

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
        environment, max_turns = self.cfg.environment, self.cfg.generator.max_turns
        for dataset in datasets:
            if not dataset.is_checked:
                dataset.check_drawn = lambda row: check_environments([row], environment, max_turns, is_complete=False)
        if not self._data_is_checked:
            check_rows(self.cfg, datasets)

    def replaces(self, *methods: str) -> bool:
        """Return True if a class that is not `is_stock` overrides one of these methods."""
        owners = (next(cls for cls in type(self).__mro__ if name in vars(cls)) for name in methods)
        return not all(vars(cls).get("is_stock", False) for cls in owners)
