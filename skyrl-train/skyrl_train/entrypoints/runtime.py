"""Garbage collection and interrupts during a run."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Exclude existing objects from garbage collection within the context, and collect new objects less often.

    Imported libraries and rollouts in flight are millions of objects, and scanning them takes half of the agent loop's
    time (`make bench-loop`). Reference counting still frees objects at once; only cycles wait longer.
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
    """Call `stop` at the first Ctrl-C, SIGTERM or SIGHUP. A second Ctrl-C or SIGTERM kills the program at once.

    The kill does not close engines and environments, because that could take as long as the step. This is safe: files
    are complete or absent at any time, and child processes end with their parent.

    A closing terminal may cause several SIGHUPs, from the shell and from the kernel, so SIGHUP is ignored after the
    first signal. If `nohup` ignores it, it stays ignored.

    The context needs a running event loop. Outside of the main thread it does nothing, because only the main thread
    receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    on_hangup, on_interrupt = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGINT)
    if on_hangup is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def remove() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def exit_at_once(number: int, _: object) -> None:
        os.write(2, b"\nstopped at once, without a checkpoint of this step\n")
        os._exit(128 + number)

    def on_first() -> None:
        remove()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, exit_at_once)
        stop()

    for number in numbers:
        loop.add_signal_handler(number, on_first)
    try:
        yield
    finally:
        remove()
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGHUP, on_hangup)
