"""Factories for the components of a trainer: prompt order, rollout source, callbacks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.error import InvalidSpec
from skyrl_train.algorithms import advantage_estimator, required_inputs
from skyrl_train.algorithms.contract import resolve_policy_loss
from skyrl_train.algorithms.inputs import FROM_GREEDY_ROLLOUTS
from skyrl_train.algorithms.rules import ALGORITHM_RULES, ALGORITHM_WARNINGS
from skyrl_train.callbacks import (
    Callback,
    Checkpointing,
    Curriculum,
    CurriculumStep,
    Evaluation,
    Export,
    Logging,
    Reporting,
    SavedConfig,
    TrajectoryDump,
)
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.validation import find_problems
from skyrl_train.dataset.mixture import MixedPrompts
from skyrl_train.dataset.order import PromptOrder, ShuffledPrompts
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.buffered import BufferedRollouts
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.rewards import functions_of_batches
from skyrl_train.generators.source import LockstepRollouts, Rollouts
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.launch.launcher import Launcher
from skyrl_train.learner import Learner
from skyrl_train.remote_storage import RemoteStorage
from skyrl_train.tracking import RunFolder, Tracking

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunParts:
    """Components that exist before the trainer: launcher, learner, engine, generator, tracker, prompts."""

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


def check_functions(cfg: SkyRLConfig) -> None:
    """Raise ConfigError if an estimator, loss or reward function is not registered, or does not fit the run."""
    advantage_estimator(cfg.trainer.algorithm.advantage_estimator)
    resolve_policy_loss(cfg.trainer.algorithm)
    raise_problems(find_problems(cfg, ALGORITHM_RULES))
    check_reward_functions(cfg)


def warn_of_functions(cfg: SkyRLConfig) -> None:
    """Log likely mistakes in the settings of estimators and losses."""
    for sentence in find_problems(cfg, ALGORITHM_WARNINGS):
        logger.warning(sentence)


def check_reward_functions(cfg: SkyRLConfig) -> None:
    """Raise ConfigError for a reward function of whole batches, which asynchronous training does not have."""
    if cfg.trainer.fully_async.enabled and (names := functions_of_batches(cfg.generator)):
        raise ConfigError(
            f"generator.reward_functions={names[0]} compares the samples of a batch, and "
            "trainer.fully_async.enabled=true scores those of one prompt at a time; register it with level=group, "
            "or set trainer.fully_async.enabled=false"
        )


def prompt_order(root: SkyRLConfig, train_dataset: PromptDataset) -> PromptOrder:
    """Return the order in which training draws its prompts."""
    cfg, mixture = root.trainer, root.data.mixture
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


def curriculum_callbacks(cfg: SkyRLConfig, prompts: PromptOrder) -> list[Callback]:
    """Return the callback of `data.mixture.curriculum`, if it is set; ConfigError if it names no function."""
    name = cfg.data.mixture.curriculum
    if name is None or not isinstance(prompts, MixedPrompts):
        return []
    try:
        curriculum: Curriculum = load_attribute(name)
    except (ImportError, InvalidSpec) as error:
        raise ConfigError(f"data.mixture.curriculum={name}: {error}") from error
    if not callable(curriculum):
        raise ConfigError(f"data.mixture.curriculum={name} is {curriculum!r}; it must be a function")
    return [CurriculumStep(prompts, curriculum)]


def standard_callbacks(
    cfg: SkyRLConfig,
    run_folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    eval_dataset: PromptDataset | None,
    generator: RolloutGenerator,
    tracker: Tracking,
) -> list[Callback]:
    """Return the callbacks of a step, in order."""
    chat = ChatEncoder(tokenizer)
    callbacks: list[Callback] = []
    if eval_dataset is not None:
        callbacks.append(Evaluation(eval_dataset, generator, run_folder, chat))
    callbacks.append(Logging(tracker))
    if cfg.trainer.dump_trajectories:
        callbacks.append(TrajectoryDump(run_folder, chat))
    return [
        SavedConfig(run_folder),
        *callbacks,
        Checkpointing(),
        Export(),
        Reporting(run_folder),
        RemoteStorage(run_folder, cfg.trainer.remote_trajectory_url),
    ]


def rollout_source(cfg: SkyRLConfig, parts: RunParts) -> Rollouts:
    """Create the source of rollouts, synchronous or asynchronous."""
    estimator = advantage_estimator(cfg.trainer.algorithm.advantage_estimator)
    greedy = bool(required_inputs(estimator) & FROM_GREEDY_ROLLOUTS)
    if cfg.trainer.fully_async.enabled:
        return BufferedRollouts(
            cfg, parts.generator, parts.prompts, total_steps=parts.total_steps, with_greedy_rewards=greedy
        )
    return LockstepRollouts(cfg, parts.generator, parts.prompts, with_greedy_rewards=greedy)
