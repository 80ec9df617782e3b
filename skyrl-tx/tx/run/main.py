"""`tx serve`, `tx train`, `tx status` and `tx version`."""

import sys
from difflib import get_close_matches
from importlib.metadata import version

USAGE = """usage: tx COMMAND …

  tx serve --base-model MODEL     serve a model to Tinker clients (tx serve --help)
  tx train --base-model MODEL --dataset FILE --output-dir FOLDER
                                  fine-tune an adapter on a file, without a server (tx train --help)
  tx status                       show the state of a server
  tx version                      show the versions of this package and of JAX
"""


def main() -> None:
    """Run a subcommand, and import only what it needs."""
    name, *arguments = sys.argv[1:] or ["--help"]
    match name:
        case "--help" | "-h" | "help":
            sys.stdout.write(USAGE)
        case "serve":
            from tx.tinker.api import main as serve

            serve(arguments, program="tx serve")
        case "train":
            from tx.run.train import main as train

            train(arguments)
        case "status":
            from tx.run.status import main as status

            status(arguments)
        case "version":
            sys.stdout.write("".join(f"{package} {version(package)}\n" for package in ("skyrl-tx", "jax")))
        case _:
            nearest = get_close_matches(name, ("serve", "train", "status", "version"), n=1)
            hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
            sys.exit(f"tx: unknown command {name!r}{hint}\n\n{USAGE}")


if __name__ == "__main__":
    main()
