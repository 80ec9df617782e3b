"""Train on Catch: register the environment, then run the ordinary training command.

python -m examples.catch.main_catch data.train_data=~/data/catch/train.parquet …
"""

from __future__ import annotations

import sys

from skyrl_gym.envs import register
from skyrl_train.entrypoints.main_base import BasePPOExp, parse_cli, run_command


def register_catch() -> None:
    """Register `env_class: catch` in this process."""
    register(id="catch", entry_point="examples.catch.env:CatchEnv")


def main() -> None:
    """Run the command line, with overrides `key=value`."""
    register_catch()
    run_command(lambda: BasePPOExp(parse_cli(sys.argv[1:])).run())


if __name__ == "__main__":
    main()
