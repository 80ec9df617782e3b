"""Experiments with SkyRL's interface, for scripts that override `get_generator`, `get_trainer` or `run`."""

from __future__ import annotations

import logging
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from skyrl_train.algorithms.rules import algorithm_warnings
from skyrl_train.compat.skyrl.absent import EXPERIMENT_METHODS, refuse_overrides
from skyrl_train.compat.skyrl.engine_client import InferenceEngineClient
from skyrl_train.compat.skyrl.generator import SkyRLGymGenerator
from skyrl_train.compat.skyrl.trainer import FullyAsyncRayPPOTrainer, RayPPOTrainer
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.base import with_value
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.rules import find_problems
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints.evaluation import EvaluationExperiment
from skyrl_train.entrypoints.experiment import RLExperiment, RunParts, check_reward_functions
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.launch.launcher import Launcher
from skyrl_train.tracking import Tracking
from skyrl_train.trainer import Trainer

logger = logging.getLogger(__name__)


class WholeRun:
    """A whole run: `train` sets it up, trains and closes it."""

    def __init__(self, experiment: BasePPOExp) -> None:
        self._experiment = experiment

    async def train(self) -> None:
        """Train to the last step, like `BasePPOExp.run` without torchrun."""
        self._experiment.check_run_folder()
        with self._experiment.running():
            await self._experiment._run()


class BasePPOExp(RLExperiment):
    """A training run with SkyRL's override points: the `get_*` methods of `RLExperiment`, `get_trainer` and `run`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise ConfigError if the subclass overrides a SkyRL method that nothing calls here."""
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls, BasePPOExp, EXPERIMENT_METHODS)

    def _setup_trainer(self) -> WholeRun:
        """Return an object for overrides of `run` that call `await trainer.train()`, like SkyRL's async example."""
        return WholeRun(self)

    def engine_client(self, engine: InferenceEngine) -> InferenceEngine:
        """Wrap the engine with SkyRL's interface."""
        return cast(
            InferenceEngine, InferenceEngineClient(engine, self.tokenizer, self.cfg.generator, self.cfg.trainer.seed)
        )

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> RolloutGenerator:
        """Create the generator that plays the rollouts."""
        return SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer)

    def get_trainer(
        self,
        cfg: SkyRLConfig,
        tracker: Tracking,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: PromptDataset,
        eval_dataset: PromptDataset | None,
        inference_engine_client: InferenceEngine,
        generator: RolloutGenerator,
        colocate_pg: None,
    ) -> RayPPOTrainer:
        """Create the trainer. Runs call this only if it is overridden, and use `trainer_class` otherwise."""
        return RayPPOTrainer(
            cfg, tracker, tokenizer, train_dataset, eval_dataset, inference_engine_client, generator, colocate_pg
        )

    def new_trainer(self, parts: RunParts) -> Trainer:
        """Create the trainer, with `get_trainer` if a script overrides it.

        Raises:
            ConfigError: `get_trainer` did not return a `RayPPOTrainer`.
        """
        if not self.replaces("get_trainer"):
            return super().new_trainer(parts)
        trainer = self.get_trainer(
            self.cfg,
            parts.tracker,
            self.tokenizer,
            parts.train_dataset,
            parts.eval_dataset,
            self.engine_client(parts.engine),
            parts.generator,
            None,
        )
        if not isinstance(trainer, RayPPOTrainer):
            raise ConfigError(
                f"{type(self).__name__}.get_trainer returned a {type(trainer).__name__}; return a subclass of "
                "skyrl_train.trainer.RayPPOTrainer, or set trainer_class to a subclass of Trainer"
            )
        if isinstance(trainer, FullyAsyncRayPPOTrainer):
            self._enable_fully_async(parts.launcher)
            trainer.cfg = self.cfg
        source_cfg, buffer = self.cfg, self.cfg.trainer.algorithm.overlong_buffer_len
        if trainer.postprocesses and buffer is not None:
            logger.info(
                "trainer.algorithm.overlong_buffer_len=%d is left to %s.postprocess_generator_output, so it is not "
                "applied before it",
                *(buffer, type(trainer).__name__),
            )
            source_cfg = with_value(self.cfg, "trainer.algorithm.overlong_buffer_len", None)
        trainer.attach(**self.trainer_parts(parts, source_cfg))
        return trainer

    def _enable_fully_async(self, launcher: Launcher) -> None:
        """Turn asynchronous training on. Raise ConfigError if the engine generates in this process."""
        if self.cfg.trainer.fully_async.enabled:
            return
        if launcher.policy is not None and self.cfg.generator.run_engines_locally:
            raise ConfigError(
                f"{type(self).__name__}.get_trainer returned a FullyAsyncRayPPOTrainer, but the engine was started for "
                "synchronous training; set trainer.fully_async.enabled=true"
            )
        known = algorithm_warnings(self.cfg)
        self.cfg = with_value(self.cfg, "trainer.fully_async.enabled", True)
        raise_problems(find_problems(self.cfg))
        check_reward_functions(self.cfg)
        for sentence in algorithm_warnings(self.cfg):
            if sentence not in known:
                logger.warning(sentence)


class EvalOnlyEntrypoint(EvaluationExperiment, BasePPOExp):
    """An evaluation without training, with SkyRL's override points."""
