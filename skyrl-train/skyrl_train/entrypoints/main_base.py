"""Train a policy: `python -m skyrl_train.entrypoints.main_base data.train_data=… trainer.policy.model.path=…`.

An alias of `skyrl train`. It imports PyTorch only after checking the configuration. Your own script registers its
environments and calls `main()`; or it subclasses `BasePPOExp`, builds `Experiment(cfg)` and calls `run()`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl_train.config import config_dir
from skyrl_train.entrypoints import cli
from skyrl_train.entrypoints.command import importing_torch, parse_cli, run_command, validate_cfg

if TYPE_CHECKING:
    from skyrl_train.entrypoints.experiment import BasePPOExp

__all__ = ["BasePPOExp", "config_dir", "main", "parse_cli", "run_command", "validate_cfg"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: `key=value` overrides and options, those of the process by default."""
    status = cli.main(["train", *(sys.argv[1:] if argv is None else argv)])
    if status:
        sys.exit(status)


def __getattr__(name: str) -> Any:
    if name != "BasePPOExp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing_torch():
        from skyrl_train.entrypoints.experiment import BasePPOExp

    return BasePPOExp


if __name__ == "__main__":
    main()
