"""Train a policy: `python -m skyrl_train.entrypoints.main_base data.train_data=… trainer.policy.model.path=…`.

An alias of `skyrl train`. It imports PyTorch only after checking the configuration. Your own script registers its
environments and calls `main()`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skyrl_train.config import config_dir
from skyrl_train.entrypoints import cli
from skyrl_train.entrypoints.command import parse_cli, run_command, validate_cfg

__all__ = ["config_dir", "main", "parse_cli", "run_command", "validate_cfg"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: `key=value` overrides and options, those of the process by default."""
    status = cli.main(["train", *(sys.argv[1:] if argv is None else argv)])
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
