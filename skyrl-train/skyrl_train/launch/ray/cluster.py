"""The connection to a Ray cluster."""

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from skyrl_train.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0


def as_task(function: Callable[..., Any]) -> Any:
    """Return a function as a Ray task that takes one CPU: `as_task(function).remote(…)`."""
    return ray.remote(num_cpus=1)(function)


def connect(prepare_process: Callable[[], None] | None = None, n_task_cpus: int = 0) -> bool:
    """Connect this process to a Ray cluster. Return False if it was already connected.

    The cluster is the one at `$RAY_ADDRESS`, or one that `ray start` started on this machine, or else a new one with
    `n_task_cpus` more CPUs than the machine has. Each process that it starts for this process calls `prepare_process`.
    Raise ConfigError if no cluster answers at `$RAY_ADDRESS`.
    """
    if ray.is_initialized():
        return False
    logging.getLogger("ray").setLevel(logging.WARNING)
    folder = os.getcwd()

    def set_up() -> None:
        """Prepare a new process of the cluster, where relative paths start at the driver's folder if it exists."""
        with suppress(OSError):
            os.chdir(folder)
        if prepare_process is not None:
            prepare_process()

    options: dict[str, Any] = {"logging_level": "WARNING", "runtime_env": {"worker_process_setup_hook": set_up}}
    n_cpus = (os.cpu_count() or 1) + n_task_cpus
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send statistics of the cluster to its makers
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
