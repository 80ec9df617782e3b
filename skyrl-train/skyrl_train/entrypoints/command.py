"""The frame of every command: logging, error messages, threads and interrupts."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers.utils.logging import disable_progress_bar

from skyrl_train import config
from skyrl_train.algorithms.rules import ALGORITHM_RULES, ALGORITHM_WARNINGS
from skyrl_train.config import SkyRLConfig, config_dir
from skyrl_train.config.validation import WARNINGS, find_problems
from skyrl_train.errors import SkyRLError


def run_command(command: Callable[[], None]) -> None:
    """Run a command. An error of this project ends it with its message and exit status 1, an interrupt with 130."""
    log_to_console()
    try:
        command()
    except* SkyRLError as group:
        for error in _leaves(group):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except* KeyboardInterrupt:
        print("Stopped. Rerun the command to resume from the last checkpoint, if there is one.", file=sys.stderr)
        sys.exit(130)


def validate_cfg(cfg: SkyRLConfig | DictConfig | Mapping[str, Any]) -> SkyRLConfig:
    """Check everything that can be checked before a run starts, and return the typed configuration.

    Raises one ConfigError that lists every problem. Register your own estimators and losses first, so that the rules
    apply to them, too.
    """
    return config.validate_cfg(cfg, ALGORITHM_RULES)


def parse_cli(argv: Sequence[str]) -> SkyRLConfig:
    """Parse `key=value` overrides into a configuration, checked as by `validate_cfg`."""
    return config.parse_cli(argv, ALGORITHM_RULES)


def find_warnings(cfg: SkyRLConfig) -> list[str]:
    """Return a sentence for each setting that is allowed but probably a mistake."""
    return find_problems(cfg, WARNINGS + ALGORITHM_WARNINGS)


def run_main(doc: str | None, run: Callable[[SkyRLConfig], None], argv: Sequence[str] | None) -> None:
    """Call `run` with the configuration of `key=value` overrides; for `--help`, print `doc` and every key."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        keys = Path(config_dir, "ppo_base_config.yaml").read_text(encoding="utf-8")
        print(doc, "Every key, its meaning and its default:", keys, sep="\n")
        return
    run_command(lambda: run(parse_cli(argv)))


def log_to_console() -> None:
    """Log the project's messages, and warnings of other packages, to standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("skyrl_train", "skyrl_gym"):
        logging.getLogger(name).setLevel(logging.INFO)
    disable_progress_bar()  # transformers shows one for each file


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Exclude existing objects from garbage collection within the context, and collect the others less often.

    Imported libraries and rollouts in flight are millions of objects, and scanning them takes half of the agent loop's
    time (`make bench-loop`). Objects without references are still freed at once.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def compute_thread() -> Iterator[ThreadPoolExecutor]:
    """Create one thread that computes with all cores, for training and generation; other threads get one core each.

    OpenMP gives each computing thread its own team. With more threads in all teams than cores, it puts them to sleep
    between operations, and a small model takes twice as long (`learnings/`).
    """
    n_cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(1, "compute", initializer=torch.set_num_threads, initargs=(n_cores,)) as executor:
            yield executor
    finally:
        torch.set_num_threads(n_cores)


@contextmanager
def on_first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C or SIGTERM; a second one ends the program after its current operation.

    Needs a running event loop. Does nothing outside of the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def remove() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def first() -> None:
        remove()
        stop()

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        remove()


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
