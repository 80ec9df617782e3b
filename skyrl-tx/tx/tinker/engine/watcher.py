"""A thread next to the engine's loop, because the loop may be in one computation for minutes."""

import logging
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Self

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Watcher:
    """A thread that calls `on_beat` every second and `on_stop` on a stop signal.

    Python runs signal handlers between two instructions of the main thread, so not during a long computation. The bytes
    that the interpreter writes to its wake-up socket arrive immediately.
    """

    def __init__(self) -> None:
        self.on_beat: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self.is_stop_requested = False
        self._receiver, self._wakeup = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def __enter__(self) -> Self:
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread handles it
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        self._wakeup.close()
        self._thread.join()
        self._receiver.close()

    def _run(self) -> None:
        while True:
            if not select.select([self._receiver], [], [], BEAT_SECONDS)[0]:
                self._call(self.on_beat)
                continue
            numbers = self._receiver.recv(64)
            if not numbers:
                return
            if not self.is_stop_requested and set(numbers) & set(STOP_SIGNALS):
                self.is_stop_requested = True
                self._call(self.on_stop)

    def _call(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # e.g. the database is busy. Without this thread, stop signals would have no effect.
            logger.exception("the engine's watcher failed; it continues")
