"""Evaluate a model without training it: `python -m skyrl_train.entrypoints.main_generate data.val_data=… …`.

An alias of `skyrl generate`. It imports PyTorch only after checking the configuration.
"""

import sys
from collections.abc import Sequence

from skyrl_train.entrypoints import cli


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line of `skyrl generate`. `argv` defaults to the arguments of the process."""
    status = cli.main(["generate", *(sys.argv[1:] if argv is None else argv)])
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
