"""Metrics on Weights & Biases; the `wandb` package is imported only when this backend is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.config.wandb_login import wandb_login_problem
from skyrl_train.errors import ConfigError


class WandbTracker:
    """One wandb run, its files in `run_dir/wandb`. The `WANDB_*` variables of the environment apply.

    Raises `ConfigError` when there is no login, the package is not installed, or wandb cannot start the run.
    """

    def __init__(self, project_name: str, run_name: str, config: Mapping[str, Any], run_dir: Path) -> None:
        if problem := wandb_login_problem(os.environ):
            raise ConfigError(problem)
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "trainer.logger=wandb needs the wandb package: pip install wandb, or choose trainer.logger=tensorboard"
            ) from error
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project_name, name=run_name, config=dict(config), dir=str(run_dir))
        except wandb.Error as error:
            raise ConfigError(
                f"wandb could not start the run {project_name}/{run_name}: {error}; "
                "check WANDB_API_KEY and the network, or export WANDB_MODE=offline"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def truncate_after(self, step: int) -> None:
        """Uploaded steps stay: a resumed run is a wandb run of its own unless `WANDB_RUN_ID` says otherwise."""

    def close(self) -> None:
        self._run.finish()
