"""The parts of a run from which its trainer is made: callbacks and the source of rollouts."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from skyrl_train.algorithms import advantage_estimator, required_inputs
from skyrl_train.algorithms.inputs import FROM_GREEDY_ROLLOUTS
from skyrl_train.callbacks import (
    Callback,
    Checkpointing,
    Evaluation,
    Export,
    Logging,
    Reporting,
    SavedConfig,
    TrajectoryDump,
)
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.rewards import functions_of_batches
from skyrl_train.generators.source import BufferedRollouts, Rollouts
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.launch.launcher import Launcher
from skyrl_train.learner import Learner
from skyrl_train.remote_storage import RemoteStorage
from skyrl_train.tracking import RunFolder, Tracking


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


def step_callbacks(
    cfg: SkyRLConfig,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    eval_dataset: PromptDataset | None,
    generator: RolloutGenerator,
    tracker: Tracking,
) -> list[Callback]:
    """Return the callbacks of a step, in order."""
    trainer, chat = cfg.trainer, ChatEncoder(tokenizer)
    evaluation = [] if eval_dataset is None else [Evaluation(eval_dataset, generator, folder, chat)]
    return [
        SavedConfig(folder),
        *evaluation,
        Logging(tracker),
        *([TrajectoryDump(folder, chat)] if trainer.dump_trajectories else []),
        Checkpointing(),
        Export(),
        Reporting(folder),
        RemoteStorage(folder, trainer.remote_trajectory_url),
    ]


def open_source(cfg: SkyRLConfig, parts: RunParts) -> Rollouts:
    """Create the source of a run's rollouts. They also play greedily if the estimator needs it."""
    estimator = advantage_estimator(cfg.trainer.algorithm.advantage_estimator)
    is_greedy = bool(required_inputs(estimator) & FROM_GREEDY_ROLLOUTS)
    if not cfg.trainer.fully_async.enabled:
        return Rollouts(cfg, parts.generator, parts.prompts, with_greedy_rewards=is_greedy)
    return BufferedRollouts(
        cfg, parts.generator, parts.prompts, total_steps=parts.total_steps, with_greedy_rewards=is_greedy
    )


def check_reward_functions(cfg: SkyRLConfig) -> None:
    """Raise ConfigError if a reward function needs whole batches and training is asynchronous."""
    if cfg.trainer.fully_async.enabled and (names := functions_of_batches(cfg.generator)):
        raise ConfigError(
            f"generator.reward_functions={names[0]} compares the samples of a batch, but "
            "trainer.fully_async.enabled=true scores one prompt at a time; register it with level=group, "
            "or set trainer.fully_async.enabled=false"
        )
