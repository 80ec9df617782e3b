"""Rules for data, environments and rewards."""

import os
from collections.abc import Iterator
from typing import Any

from skyrl_train.config.problems import show
from skyrl_train.config.root import REWARD_FUNCTION_ENV, SkyRLConfig


def sources_can_be_read(cfg: Any) -> Iterator[str]:
    """Reject training without data files, datasets or a dataset class, and a validation source that is listed twice."""
    has_class = isinstance(cfg, SkyRLConfig) and cfg.data.custom_cls.path is not None
    if not cfg.data.train_data and not has_class:
        yield "data.train_data=[] leaves nothing to train on; set data.train_data=[<file or dataset name>]"
    for source in _repeated_sources(cfg.data.val_data):
        yield f"data.val_data has {show(source)} twice, so its rows would count twice; name it once"


def custom_dataset_is_complete(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject an incomplete dataset class, options without a class, and a class combined with a mixture."""
    custom = cfg.data.custom_cls
    if (custom.path is None) != (custom.name is None):
        given, missing = ("path", "name") if custom.name is None else ("name", "path")
        yield (
            f"data.custom_cls.{given}={show(getattr(custom, given))} needs data.custom_cls.{missing} too: a dataset "
            "class is the name of a class and the path of its file"
        )
    elif custom.path is None and custom.config:
        yield (
            f"data.custom_cls.config={show(custom.config)} has no class to configure; set data.custom_cls.path and "
            "data.custom_cls.name"
        )
    elif custom.path is not None and cfg.data.mixture.is_used:
        yield (
            f"data.mixture reads all rows before training, and data.custom_cls.path={show(custom.path)} creates them "
            "when they are drawn; remove one of them"
        )


def environment_plays_as_configured(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject a reward function in environments that score replies, and an interpreter for environments in threads."""
    path, env_class = cfg.custom_reward_function.path, cfg.environment.env_class
    if path is not None and env_class != REWARD_FUNCTION_ENV:
        yield (
            f"custom_reward_function.path={show(path)} scores replies in place of environment.env_class={env_class}; "
            "remove one of them"
        )
    if path is not None and cfg.generator.max_turns > 1:
        yield (
            f"custom_reward_function.path={show(path)} scores one reply, so generator.max_turns="
            f"{cfg.generator.max_turns} has no effect; set generator.max_turns=1"
        )
    gym = cfg.environment.skyrl_gym
    if gym.python is not None and gym.isolation != "process":
        yield (
            f"environment.skyrl_gym.python={show(gym.python)} is used only by environments in separate processes, but "
            f"environment.skyrl_gym.isolation={gym.isolation} runs them in the trainer; set "
            "environment.skyrl_gym.isolation=process, or environment.skyrl_gym.python=null"
        )


def _repeated_sources(sources: list[str]) -> Iterator[str]:
    """Yield each source that repeats an earlier entry, possibly with a different spelling of its path."""
    paths = [os.path.abspath(os.path.expandvars(os.path.expanduser(source))) for source in sources]
    return (source for index, source in enumerate(sources) if paths[index] in paths[:index])


def sources_are_unusual(cfg: Any) -> Iterator[str]:
    """Warn about a training source that is listed twice, and that evaluations without prompts are skipped."""
    for source in _repeated_sources(cfg.data.train_data):
        yield f"data.train_data has {show(source)} twice, so an epoch trains on its rows twice; name it once"
    needs_sources = isinstance(cfg, SkyRLConfig) and cfg.data.custom_cls.path is None
    if needs_sources and not cfg.data.val_data and cfg.trainer.eval_interval > 0:
        yield "No evaluations, because data.val_data=[]. Set it, or set trainer.eval_interval=-1"
