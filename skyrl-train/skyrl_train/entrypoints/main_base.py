"""Train a policy: `python -m skyrl_train.entrypoints.main_base data.train_data=… trainer.policy.model.path=…`.

An alias of `skyrl train`. It imports PyTorch only after checking the configuration. Your own script registers its
environments and calls `main()`; or it subclasses `BasePPOExp`, builds `Experiment(cfg)` and calls `run()`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl_train.absent import refuse_name
from skyrl_train.config import config_dir
from skyrl_train.entrypoints import cli
from skyrl_train.entrypoints.command import importing_torch, parse_cli, run_command, validate_cfg

if TYPE_CHECKING:
    from skyrl_train.entrypoints.experiment import BasePPOExp

    skyrl_entrypoint: Any
    """A task of Ray that runs the experiment of a configuration: `ray.get(skyrl_entrypoint.remote(cfg))`."""

__all__ = ["BasePPOExp", "config_dir", "main", "parse_cli", "run_command", "skyrl_entrypoint", "validate_cfg"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: `key=value` overrides and options, those of the process by default."""
    status = cli.main(["train", *(sys.argv[1:] if argv is None else argv)])
    if status:
        sys.exit(status)


def _run_experiment(cfg: Any) -> None:
    """Run the experiment of a configuration, in a task."""
    with importing_torch():
        from skyrl_train.entrypoints.experiment import BasePPOExp

    BasePPOExp(cfg).run()


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch or ray at its first use."""
    if name == "BasePPOExp":
        with importing_torch():
            from skyrl_train.entrypoints.experiment import BasePPOExp

        return BasePPOExp
    if name != "skyrl_entrypoint":
        refuse_name("skyrl_train.entrypoints.main_base", name)  # this may be __main__
    from skyrl_train.launch.ray.cluster import as_task

    return as_task(_run_experiment)


if __name__ == "__main__":
    main()
