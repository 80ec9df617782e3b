"""What every command does around its work: logging, errors without a traceback, threads, gentle stops."""

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
    """Run a command. A mistake of the user's ends with its message and exit status 1, an interrupt with 130."""
    log_to_console()
    try:
        command()
    except* SkyRLError as group:
        for error in _leaves(group):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except* KeyboardInterrupt:
        print(
            "Stopped. Given again, the same command goes on from its last checkpoint, if it has one.", file=sys.stderr
        )
        sys.exit(130)


def validate_cfg(cfg: SkyRLConfig | DictConfig | Mapping[str, Any]) -> SkyRLConfig:
    """Check everything that can be checked before a run starts, and return the typed configuration.

    Raises one ConfigError that lists every problem. Register estimators and losses of your own before: the rules apply
    to them, too.
    """
    return config.validate_cfg(cfg, ALGORITHM_RULES)


def parse_cli(argv: Sequence[str]) -> SkyRLConfig:
    """Return the configuration of `key=value` overrides, checked as by `validate_cfg`."""
    return config.parse_cli(argv, ALGORITHM_RULES)


def find_warnings(cfg: SkyRLConfig) -> list[str]:
    """Return a sentence for each setting that is allowed, but most likely not meant."""
    return find_problems(cfg, WARNINGS + ALGORITHM_WARNINGS)


def run_main(doc: str | None, run: Callable[[SkyRLConfig], None], argv: Sequence[str] | None) -> None:
    """A command line of `key=value` overrides: `run` with the configuration, or `--help`: `doc` and every key."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        keys = Path(config_dir, "ppo_base_config.yaml").read_text(encoding="utf-8")
        print(doc, "Every key, its meaning and its default:", keys, sep="\n")
        return
    run_command(lambda: run(parse_cli(argv)))


def log_to_console() -> None:
    """Show what the project says, and other packages' warnings, on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("skyrl_train", "skyrl_gym"):
        logging.getLogger(name).setLevel(logging.INFO)
    disable_progress_bar()  # transformers draws one for each file it reads or writes


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Within, let the garbage collector leave alone what is there, and look at the rest less often.

    Imported libraries are half a million objects, and thousands of rollouts in flight are as many; going through them
    time and again takes half of the agent loop's time (`make bench-loop`). What no longer has a reference is freed at
    once all the same.
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
    """One thread for all that takes every core, whether it trains or generates; meanwhile the caller's computes alone.

    OpenMP gives each thread that computes a team of its own. Once the teams have more threads than there are cores, it
    puts them to sleep between operations, and a small model takes twice as long (`learnings/`).
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
    """Call `stop` at the first Ctrl-C or SIGTERM; a second one ends the program, after the operation it is in.

    Needs a running event loop. Outside the main thread, signals are none of ours.
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
