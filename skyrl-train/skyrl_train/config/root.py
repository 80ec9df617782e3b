"""The whole configuration: four sections."""

from __future__ import annotations

from skyrl_train.config.base import Section
from skyrl_train.config.data import DataConfig
from skyrl_train.config.environment import EnvironmentConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.trainer import TrainerConfig


class SkyRLConfig(Section):
    """The typed configuration of a run; `load_config` returns it."""

    data: DataConfig = DataConfig()
    """The datasets: prompts to train on and prompts to evaluate on."""

    trainer: TrainerConfig = TrainerConfig()
    """The training run."""

    generator: GeneratorConfig = GeneratorConfig()
    """The rollout engine and the loop that plays trajectories with it."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """The environment and its settings."""
