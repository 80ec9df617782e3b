"""SkyRL's Ray task: `ray.get(skyrl_entrypoint.remote(cfg))` runs an experiment."""

from typing import Any

from skyrl_train.entrypoints.command import importing_torch
from skyrl_train.launch.ray.cluster import as_task


def run_experiment(cfg: Any) -> None:
    """Run the experiment of a configuration."""
    with importing_torch():
        from skyrl_train.compat.skyrl.experiment import BasePPOExp

    BasePPOExp(cfg).run()


skyrl_entrypoint = as_task(run_experiment)
