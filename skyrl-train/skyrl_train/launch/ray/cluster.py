"""The connection to a Ray cluster, and the user's registrations in its processes."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from omegaconf import DictConfig

from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.envs.registration import registry as ENVIRONMENTS
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.rewards import REWARD_FUNCTIONS

CONNECT_TIMEOUT_S = 10.0


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
        return cls(environments, ADVANTAGE_ESTIMATORS.entries(), POLICY_LOSSES.entries(), dict(REWARD_FUNCTIONS))

    def restore(self) -> None:
        """Also register everything in this process."""
        ENVIRONMENTS.update(self.environments)
        ADVANTAGE_ESTIMATORS.update(self.estimators)
        POLICY_LOSSES.update(self.losses)
        REWARD_FUNCTIONS.update(self.reward_functions)


def initialize_ray(cfg: SkyRLConfig | DictConfig) -> None:
    """Connect a script to a Ray cluster, as SkyRL scripts do before they run an experiment in a task.

    Environments, estimators, losses and reward functions registered so far are also registered in all processes of the
    cluster. A new cluster has one CPU more than this machine, for the task. `cfg` is ignored.

    Raises:
        ConfigError: no cluster answers at `$RAY_ADDRESS`.
    """
    connect(Registrations.collect(), n_task_cpus=1)


def as_task(function: Callable[..., Any]) -> Any:
    """Return a function as a Ray task that takes one CPU: `as_task(function).remote(…)`."""
    return ray.remote(num_cpus=1)(function)


def connect(registrations: Registrations | None = None, n_task_cpus: int = 0) -> bool:
    """Connect this process to a Ray cluster.

    Use the cluster at `$RAY_ADDRESS` or one that `ray start` started on this machine. Otherwise start one.

    Args:
        registrations: restored in each process that the cluster starts for this process.
        n_task_cpus: CPUs that a new cluster has in addition to the machine's.

    Returns:
        False if this process was already connected.

    Raises:
        ConfigError: no cluster answers at `$RAY_ADDRESS`.
    """
    if ray.is_initialized():
        return False
    logging.getLogger("ray").setLevel(logging.WARNING)
    folder = os.getcwd()

    def set_up() -> None:
        """Prepare a new process of the cluster, where relative paths start at the driver's folder if it exists."""
        with suppress(OSError):
            os.chdir(folder)
        if registrations is not None:
            registrations.restore()

    options: dict[str, Any] = {"logging_level": "WARNING", "runtime_env": {"worker_process_setup_hook": set_up}}
    n_cpus = (os.cpu_count() or 1) + n_task_cpus
    _check_address()
    try:
        ray.init(num_cpus=n_cpus, include_dashboard=False, **options)
    except ValueError:  # the cluster exists already, and its size cannot be set
        ray.init(**options)
    return True


def _check_address() -> None:
    """Raise ConfigError if nothing listens at `$RAY_ADDRESS`. Ray itself would retry for minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise ConfigError(f"RAY_ADDRESS={address}: Ray Client is not supported; set it to <head node>:6379")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # local, auto, or unset
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start it with `ray start --head`, or set "
            "RAY_ADDRESS=local to use this machine alone"
        ) from error
