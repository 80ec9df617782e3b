"""SkyRL's `initialize_ray`: connect a script to a Ray cluster whose processes share the script's registrations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.envs.registration import registry as ENVIRONMENTS
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.config import SkyRLConfig
from skyrl_train.generators.rewards import REWARD_FUNCTIONS
from skyrl_train.launch.ray.cluster import connect


@dataclass(frozen=True, slots=True)
class Registrations:
    """Everything registered in a process: environments, estimators, losses and reward functions."""

    environments: dict[str, EnvSpec]
    estimators: dict[str, Any]
    losses: dict[str, Any]
    reward_functions: dict[str, Any]

    @classmethod
    def collect(cls) -> Registrations:
        """Collect the registrations of this process.

        Environments named `__main__:…` are resolved to their class, because `__main__` is a different module in other
        processes.
        """
        environments = {
            name: replace(spec, entry_point=spec.load()) if str(spec.entry_point).startswith("__main__:") else spec
            for name, spec in ENVIRONMENTS.items()
        }
        return cls(
            environments, dict(ADVANTAGE_ESTIMATORS.entries), dict(POLICY_LOSSES.entries), dict(REWARD_FUNCTIONS)
        )

    def restore(self) -> None:
        """Add the registrations to this process."""
        ENVIRONMENTS.update(self.environments)
        ADVANTAGE_ESTIMATORS.entries.update(self.estimators)
        POLICY_LOSSES.entries.update(self.losses)
        REWARD_FUNCTIONS.update(self.reward_functions)


def initialize_ray(cfg: SkyRLConfig | DictConfig) -> None:
    """Connect to a Ray cluster, as SkyRL scripts do before they run an experiment in a task.

    Processes that the cluster starts for this script get the environments, estimators, losses and reward functions
    registered so far. A new cluster gets one CPU more than this machine has, for the task. `cfg` is ignored.

    Raises:
        ConfigError: no cluster answers at `$RAY_ADDRESS`, or it is a Ray Client address.
    """
    connect(Registrations.collect().restore, n_task_cpus=1)
