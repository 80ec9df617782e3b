"""Metrics backends with SkyRL's constructor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from skyrl_train import tracking
from skyrl_train.config import SkyRLConfig


class Tracking(tracking.Tracking):
    """The metrics backends of a run, for `BasePPOExp.get_tracker`."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: str | Sequence[str] = "console",
        config: SkyRLConfig | DictConfig | Mapping[str, Any] | None = None,
    ) -> None:
        """Log to `backends`, and to `metrics.jsonl` in the run folder (from `config`, or else under `outputs/`).

        Raises:
            ConfigError: a backend is unknown, or cannot start.
        """
        folder = Path("outputs") / project_name / experiment_name
        settings: Any = config or {}
        if isinstance(config, SkyRLConfig):
            folder, settings = Path(config.trainer.run_dir), config.model_dump(mode="json")
        elif isinstance(config, DictConfig):
            settings = OmegaConf.to_container(config, resolve=True)
        super().__init__(project_name, experiment_name, backends, settings, folder)
