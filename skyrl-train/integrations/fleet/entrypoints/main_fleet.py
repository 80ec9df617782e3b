"""Train on Fleet tasks: `python -m integrations.fleet.entrypoints.main_fleet data.train_data=… generator.max_turns=50`.

Works like `skyrl train`, with the environment `fleet_task`, metrics by environment and alerts. Without
`trainer.project_name`, the project is `fleet-task-grpo`. Without `generator.trajectory_timeout_seconds`, a rollout ends
when Fleet stops its software.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import skyrl_gym
from integrations.fleet.env import ENTRY_POINT, ENV_CLASS, FleetSettings
from integrations.fleet.metrics import FleetMetrics, ToolErrorAlert
from integrations.fleet.tasks import NEEDS_IMAGES, TOOL_USE
from skyrl_gym.adapters.settings import read_settings
from skyrl_gym.envs.registration import registry
from skyrl_gym.error import InvalidSettings
from skyrl_train.callbacks import Callback
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.problems import Rule
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints import main_base
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.media.processing import is_vision_model
from skyrl_train.tracking import Tracking

PROJECT_NAME = "fleet-task-grpo"


class FleetExp(RLExperiment):
    """A training run on Fleet tasks."""

    def check_environments(self, datasets: Sequence[PromptDataset]) -> None:
        """Check all rows. Raise DataError if some have screenshots and the model reads only text."""
        super().check_environments(datasets)
        if is_vision_model(self.tokenizer.name_or_path):
            return
        for location, row in (located for dataset in datasets for located in dataset.checked_rows()):
            if (modality := row.env_extras.get("modality", TOOL_USE)) != TOOL_USE:
                raise DataError(f"{location} has the modality {modality}, {NEEDS_IMAGES}")

    def get_callbacks(
        self, eval_dataset: PromptDataset | None, generator: RolloutGenerator, tracker: Tracking
    ) -> list[Callback]:
        """Return the callbacks, with metrics by environment before the logging and alerts after it."""
        return [FleetMetrics(), *super().get_callbacks(eval_dataset, generator, tracker), ToolErrorAlert()]


def register_fleet() -> None:
    """Register the environment `fleet_task` in this process."""
    if ENV_CLASS not in registry:
        skyrl_gym.register(ENV_CLASS, ENTRY_POINT)


def with_project(arguments: Sequence[str]) -> list[str]:
    """Add `trainer.project_name` to the overrides, unless they or WANDB_PROJECT name the project."""
    names_project = any(argument.lstrip("+").startswith("trainer.project_name=") for argument in arguments)
    if names_project or os.environ.get("WANDB_PROJECT"):
        return list(arguments)
    return [*arguments, f"trainer.project_name={PROJECT_NAME}"]


def read_config(arguments: Sequence[str], file: Path | None = None, *rules: Rule) -> SkyRLConfig:
    """Parse overrides to a configuration in which no rollout outlives its software.

    Raises:
        ConfigError: a setting is invalid, or rollouts may take longer than `ttl_seconds`.
    """
    arguments = with_project(arguments)
    cfg = parse_cli(arguments, file, *rules)
    try:
        ttl_s = read_settings(FleetSettings, ENV_CLASS, cfg.environment.skyrl_gym.env_config(ENV_CLASS), {}).ttl_seconds
    except InvalidSettings as error:
        raise ConfigError(str(error)) from error
    limit_s = cfg.generator.trajectory_timeout_seconds
    if limit_s is None:
        return parse_cli([*arguments, f"generator.trajectory_timeout_seconds={ttl_s}"], file, *rules)
    if limit_s > ttl_s:
        raise ConfigError(
            f"generator.trajectory_timeout_seconds={limit_s:g} is longer than the {ttl_s} s after which Fleet stops an "
            f"episode's software; set environment.skyrl_gym.{ENV_CLASS}.ttl_seconds={math.ceil(limit_s)}, or a "
            "shorter time limit"
        )
    return cfg


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, with the options of `skyrl train`."""
    register_fleet()
    main_base.main(argv, FleetExp, read_config)


if __name__ == "__main__":
    main()
