"""Fine-tune on demonstrations: `python -m skyrl_train.entrypoints.main_sft data.train_data=… …`.

An alias of `skyrl sft`. It imports PyTorch only after checking the configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl_train.entrypoints import cli
from skyrl_train.entrypoints.command import importing_torch

if TYPE_CHECKING:
    from skyrl_train.entrypoints.sft import SFTExp

__all__ = ["SFTExp", "main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line of `skyrl sft`. `argv` defaults to the arguments of the process."""
    status = cli.main(["sft", *(sys.argv[1:] if argv is None else argv)])
    if status:
        sys.exit(status)


def __getattr__(name: str) -> Any:
    if name != "SFTExp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing_torch():
        from skyrl_train.entrypoints.sft import SFTExp

    return SFTExp


if __name__ == "__main__":
    main()
