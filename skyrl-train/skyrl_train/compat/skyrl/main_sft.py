"""Fine-tune on demonstrations: `python -m skyrl_train.entrypoints.main_sft data.train_data=… …`.

An alias of `skyrl sft`. It imports PyTorch only after checking the configuration.
"""

from functools import partial

from skyrl_train.entrypoints.cli import run_subcommand

__all__ = ["main"]

main = partial(run_subcommand, "sft")
