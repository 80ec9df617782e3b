"""Evaluate a model without training it: `python -m skyrl_train.entrypoints.main_generate data.val_data=… …`.

An alias of `skyrl generate`. It imports PyTorch only after checking the configuration.
"""

from functools import partial

from skyrl_train.entrypoints.cli import run_subcommand

__all__ = ["main"]

main = partial(run_subcommand, "generate")
