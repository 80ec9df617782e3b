"""Check that an interpreter has an environment's packages: `python -m skyrl_gym.runtime.packages module:ClassName`.

A second argument, a JSON list, adds import paths. Without it, modules in the current folder are importable. If the
environment cannot be imported or lacks a package, prints the fault and exits with status 1.
"""

import json
import os
import subprocess
import sys
from typing import Any

from skyrl_gym.core import Env
from skyrl_gym.envs.registration import load_env_creator
from skyrl_gym.runtime.text import describe_error

TIMEOUT_S = 120.0  # imports on a busy machine


def check_packages(creator: Any) -> None:
    """Raise ImportError if this interpreter lacks a package that the environment imports only during an episode."""
    if isinstance(creator, type) and issubclass(creator, Env):
        creator.check_packages()


def find_fault(python: str, entry_point: str) -> str | None:
    """Return why another interpreter cannot run an environment, or None if it can."""
    command = [python, "-m", __name__, entry_point, json.dumps(import_paths())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its imports take longer than {TIMEOUT_S:g} s"
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ended with exit status {done.returncode}"


def import_paths() -> list[str]:
    """Return this program's import paths without its Python installation's own."""
    prefixes = (sys.prefix, sys.base_prefix)
    return [os.getcwd(), *(path for path in sys.path if path and not path.startswith(prefixes))]


def main(entry_point: str, paths: str = "[]") -> None:
    """Import an environment and check its packages."""
    sys.path[:] = [path for path in json.loads(paths) if path not in sys.path] + sys.path
    try:
        check_packages(load_env_creator(entry_point))
    except Exception as error:  # noqa: BLE001, modules of environments raise any error
        sys.exit(describe_error(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
