"""`tx serve`, `tx train`, `tx status` and `tx version`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

USAGE = """usage: tx COMMAND …

  tx serve --base-model MODEL     serve a model to Tinker clients (tx serve --help)
  tx train --base-model MODEL --dataset FILE --output-dir FOLDER
                                  fine-tune an adapter on a file, without a server (tx train --help)
  tx status                       show the state of a server
  tx version                      show the versions of this package and of JAX
"""


def main() -> None:
    """Dispatch to the subcommand."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        sys.stdout.write(USAGE)
        return
    if name not in COMMANDS:
        sys.exit(f"tx: unknown command {name!r}\n\n{USAGE}")
    COMMANDS[name](arguments)


def _serve(arguments: Sequence[str]) -> None:
    from tx.tinker.api import main as serve

    serve(arguments, program="tx serve")


def _train(arguments: Sequence[str]) -> None:
    from tx.run.train import main as train

    train(arguments)


def _status(arguments: Sequence[str]) -> None:
    from tx.run.status import main as status

    status(arguments)


def _version(_: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{name} {version(name)}\n" for name in ("skyrl-tx", "jax")))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "serve": _serve,
    "train": _train,
    "status": _status,
    "version": _version,
}


if __name__ == "__main__":
    main()
