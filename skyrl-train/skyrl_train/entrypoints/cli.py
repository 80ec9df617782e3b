"""`skyrl`: the commands of this project.

skyrl train key=value …      train (python -m skyrl_train.entrypoints.main_base)
skyrl generate key=value …   evaluate a model without training it (… main_generate)
skyrl env check module:Env   environments without a trainer: check, play, list
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Each command imports only what it needs."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # a configuration may name modules in the current folder, as with python -m
    match list(sys.argv[1:] if argv is None else argv):
        case ["train", *overrides]:
            from skyrl_train.entrypoints.main_base import main as train

            train(overrides)
        case ["generate", *overrides]:
            from skyrl_train.entrypoints.main_generate import main as generate

            generate(overrides)
        case ["env", *arguments]:
            from skyrl_gym.cli import main as env

            return env(arguments, prog="skyrl env")
        case ["-h" | "--help", *_]:
            print(__doc__, end="")
        case _:
            print(__doc__, end="", file=sys.stderr)
            return 2
    return 0


def run() -> None:
    """Run the script `skyrl`."""
    sys.exit(main())
