"""Train on Catch: register the environment, then run the standard training command.

python -m examples.catch.main_catch data.train_data=~/data/catch/train.parquet …
"""

from skyrl_gym.envs import register
from skyrl_train.entrypoints import main_base


def register_catch() -> None:
    """Register `env_class: catch` in this process."""
    register(id="catch", entry_point="examples.catch.env:CatchEnv")


def main() -> None:
    """Run the command line: overrides `key=value` and the options of `skyrl train`."""
    register_catch()
    main_base.main()


if __name__ == "__main__":
    main()
