"""Train a policy: `python -m skyrl_train.entrypoints.main_base data.train_data=… trainer.policy.model.path=…`.

An alias of `skyrl train`. It imports PyTorch only after checking the configuration. Your own script can register its
environments and call `main()`, optionally with its own experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from skyrl_train.config import config_dir
from skyrl_train.entrypoints import cli
from skyrl_train.entrypoints.command import parse_cli, run_command, validate_cfg
from skyrl_train.entrypoints.start import Program

if TYPE_CHECKING:
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.entrypoints.base import Experiment

__all__ = ["config_dir", "main", "parse_cli", "run_command", "validate_cfg"]


def main(
    argv: Sequence[str] | None = None,
    experiment: Callable[[SkyRLConfig], Experiment] | None = None,
    parse: Callable[..., SkyRLConfig] = parse_cli,
) -> None:
    """Run the command line of `skyrl train`: `key=value` overrides, and options such as `--config` and `--dry-run`.

    Args:
        argv: the arguments. Defaults to the arguments of the process.
        experiment: creates your own experiment, e.g. a subclass of `RLExperiment`.
        parse: parses the overrides instead of `parse_cli`, with the same arguments.
    """
    cli.run_subcommand("train", argv, Program(experiment, parse))


if __name__ == "__main__":
    main()
