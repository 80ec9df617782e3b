"""Background file writes, so that a slow disk does not delay training."""

import errno
import queue
import threading
from collections.abc import Callable

MAX_WAITING = 10_000
TIMEOUT_S = 60.0
"""Maximum wait in seconds for a disk that does not respond, when a run flushes or ends."""


class BackgroundWriter:
    """A thread that runs calls in order. If a call fails, the next `submit` or `close` raises its error."""

    def __init__(self, name: str) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call, then raise the error of an earlier call, if any.

        If `MAX_WAITING` calls are already waiting, drop this one and raise OSError.
        """
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise OSError(errno.ETIMEDOUT, f"{MAX_WAITING} writes wait for a disk that does not respond") from None
        self._raise_failure()

    def flush(self) -> None:
        """Wait until all queued calls have run. OSError after `TIMEOUT_S`."""
        written = threading.Event()
        if not self._put(written.set) or not written.wait(TIMEOUT_S):
            raise OSError(errno.ETIMEDOUT, f"the disk does not respond for {TIMEOUT_S:g} s")

    def close(self) -> None:
        """Run the queued calls and end the thread, then raise the error of an earlier call, if any.

        Raise OSError if the disk does not respond for `TIMEOUT_S`.
        """
        if self._put(None):
            self._thread.join(TIMEOUT_S)
        if self._thread.is_alive():
            raise OSError(errno.ETIMEDOUT, f"the disk does not respond for {TIMEOUT_S:g} s")
        self._raise_failure()

    def _put(self, call: Callable[[], None] | None) -> bool:
        try:
            self._calls.put(call, timeout=TIMEOUT_S)
        except queue.Full:
            return False
        return True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001, raised in the caller's thread
                self._failure = self._failure or error
