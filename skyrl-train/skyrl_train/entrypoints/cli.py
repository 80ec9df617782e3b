"""`skyrl`: the commands of this project.

skyrl train key=value …      train (python -m skyrl_train.entrypoints.main_base)
skyrl generate key=value …   evaluate a model without training it (… main_generate)
skyrl env check module:Env   environments without a trainer: check, play, list
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(arguments[0]) if arguments else None
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules that a configuration names may lie in the current folder, as with python -m
    if command is not None:
        return command(arguments[1:])
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    print(__doc__, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _train(arguments: list[str]) -> int:
    from skyrl_train.entrypoints.main_base import main

    main(arguments)
    return 0


def _generate(arguments: list[str]) -> int:
    from skyrl_train.entrypoints.main_generate import main

    main(arguments)
    return 0


def _env(arguments: list[str]) -> int:
    from skyrl_gym.cli import main

    return main(arguments, prog="skyrl env")


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {"train": _train, "generate": _generate, "env": _env}
"""Each imports what it needs when it is asked for."""


def run() -> None:
    """The script `skyrl`."""
    sys.exit(main())
