"""Garbage collection and interrupts while a run works."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
def on_first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C, SIGTERM or SIGHUP; a second one ends the program after its current operation.

    A terminal that closes may send SIGHUP several times, from the shell and from the kernel, so SIGHUP is ignored after
    the first signal. It stays ignored where `nohup` has done so. Needs a running event loop. Does nothing outside of
    the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    on_hangup = signal.getsignal(signal.SIGHUP)
    if on_hangup is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def remove() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def first() -> None:
        remove()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop()

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        remove()
        signal.signal(signal.SIGHUP, on_hangup)
