"""Shared parts of all commands: logging, error messages and exit status. Fast to import."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.runtime.console import guard_console
from skyrl_gym.runtime.text import describe_error
from skyrl_train.errors import SkyRLError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from skyrl_train.config import SkyRLConfig
    from skyrl_train.config.problems import Rule

Parameters = ParamSpec("Parameters")


def run_command(command: Callable[[], None]) -> None:
    """Run a command. On a SkyRLError, print its message and exit with its status. On Ctrl-C, exit with status 130.

    Under torchrun, rank 0 runs the command, and all other processes serve as ranks of its model.
    """
    log_to_console()
    try:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            command()
            return
        from skyrl_train.launch import torchrun  # imports torch

        processes = torchrun.Torchrun.find()
        assert processes is not None
        if processes.rank > 0:
            logging.getLogger("skyrl_train").setLevel(logging.WARNING)  # all ranks would log the same lines
            torchrun.serve_driver(processes)
        else:
            command()
            torchrun.release_ranks(processes)
    except* SkyRLError as group:
        errors = _leaves(group)
        for message in dict.fromkeys(map(str, errors)):  # concurrent rollouts fail for the same reason
            print(f"error: {message}", file=sys.stderr)
        sys.exit(max(error.exit_status for error in errors))
    except* KeyboardInterrupt:
        sys.exit(130)


def as_command(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Decorate a function to run inside `run_command`."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        run_command(lambda: function(*args, **kwargs))

    return run


@contextmanager
def importing_torch() -> Iterator[None]:
    """Disable garbage collection while modules import PyTorch and transformers, to make the imports a fifth faster.

    The imported objects are also excluded from later collections.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextmanager
def exit_on_mistake(*, is_program: bool) -> Iterator[None]:
    """If `is_program`, print a SkyRLError as one message and exit with its status. Otherwise, let it propagate."""
    try:
        yield
    except SkyRLError as error:
        if not is_program:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


@cache
def _import(name: str) -> None:
    """Import `module`, or call `module:function`, once per process."""
    if ":" in name:
        load_attribute(name)()
    else:
        import_module(name)


def import_modules(cfg: SkyRLConfig) -> Iterator[str]:
    """Import the modules of `environment.imports`. Yield a problem for each module that cannot be imported."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # find modules in the current folder, like python -m
    for name in cfg.environment.imports:
        try:
            _import(name)
        except Exception as error:  # noqa: BLE001, the boundary of user code
            yield f"environment.imports={name}: {describe_error(error)}; use module, or module:function"


def validate_cfg(cfg: SkyRLConfig | DictConfig | Mapping[str, Any]) -> SkyRLConfig:
    """Check everything that can be checked before a run starts, and return the typed configuration.

    Register custom estimators and losses first, so that the rules also apply to them.

    In a script with `@hydra.main`, a mistake ends the process with one message instead of Hydra's traceback. Hydra also
    rejects `--dry-run`, so set `SKYRL_DRY_RUN=1` in the environment to print the plan of the run and exit.

    Raises:
        ConfigError: the configuration is invalid. The message lists every problem.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from skyrl_train import config
    from skyrl_train.algorithms.rules import ALGORITHM_RULES

    is_one_run = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.RUN  # a sweep tries all combinations
    with exit_on_mistake(is_program=is_one_run):
        validated = config.validate_cfg(cfg, (import_modules, *ALGORITHM_RULES))
        if is_one_run and os.environ.get("SKYRL_DRY_RUN") == "1":
            from skyrl_train.config.problems import raise_problems
            from skyrl_train.entrypoints.describe_plan import print_plan
            from skyrl_train.entrypoints.preflight import find_missing

            raise_problems(find_missing(validated, trains=True))
            print_plan(validated, is_custom=True)
            sys.exit()
    return validated


def parse_cli(argv: Sequence[str], file: Path | None = None, *rules: Rule) -> SkyRLConfig:
    """Parse `key=value` overrides of a YAML file or of the defaults, and validate the result.

    Additional `rules`, e.g. for missing files, are checked together with the standard rules. The ConfigError lists the
    problems of both.
    """
    from skyrl_train import config
    from skyrl_train.algorithms.rules import ALGORITHM_RULES

    return config.parse_cli(argv, (import_modules, *ALGORITHM_RULES, *rules), file)


def log_to_console() -> None:
    """Log our messages and other packages' warnings to standard error. A closed terminal does not end the run."""
    guard_console()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("skyrl_train", "skyrl_report", "skyrl_gym", "skyrl_agent"):
        logging.getLogger(name).setLevel(logging.INFO)


def _leaves(error: SkyRLError | BaseExceptionGroup[SkyRLError]) -> list[SkyRLError]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
