"""SkyRL's `initialize_ray`: connect a script to a Ray cluster whose processes share the script's registrations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig

from skyrl_gym.envs.registration import registry as ENVIRONMENTS
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.config import SkyRLConfig
from skyrl_train.generators.rewards import REWARD_FUNCTIONS
from skyrl_train.launch.ray.cluster import connect

REGISTRIES: tuple[dict[str, Any], ...] = (
    ENVIRONMENTS,
    ADVANTAGE_ESTIMATORS.entries,
    POLICY_LOSSES.entries,
    REWARD_FUNCTIONS,
)


def collect_registrations() -> list[dict[str, Any]]:
    """Return copies of this process's registries.

    Environments named `__main__:…` are resolved to their class, because `__main__` is a different module in other
    processes.
    """
    environments, *others = map(dict, REGISTRIES)
    for name, spec in environments.items():
        if str(spec.entry_point).startswith("__main__:"):
            environments[name] = replace(spec, entry_point=spec.load())
    return [environments, *others]


def restore_registrations(registrations: list[dict[str, Any]]) -> None:
    """Add the entries of another process's registries to this process."""
    for registry, entries in zip(REGISTRIES, registrations, strict=True):
        registry.update(entries)


def initialize_ray(cfg: SkyRLConfig | DictConfig) -> None:
    """Connect to a Ray cluster, as SkyRL scripts do before they run an experiment in a task.

    Processes that the cluster starts for this script get the environments, estimators, losses and reward functions
    registered so far. A new cluster gets one CPU more than this machine has, for the task. `cfg` is ignored.

    Raises:
        ConfigError: no cluster answers at `$RAY_ADDRESS`, or it is a Ray Client address.
    """
    connect(partial(restore_registrations, collect_registrations()), n_task_cpus=1)
