"""Threads, garbage collection and interrupts while a run works."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


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
