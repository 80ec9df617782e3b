"""A limit on this process's concurrent sessions on a server, either configured or found by trial."""

import asyncio
import math
import threading
import time
from collections import deque
from dataclasses import dataclass

PROBE_S = 10.0
"""Seconds after a rejection before one more session is tried, since other clients may have left."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A coroutine that waits for a slot, in its own event loop."""

    loop: asyncio.AbstractEventLoop
    is_admitted: asyncio.Future[None]
    has_slot: bool = False


class SessionSlots:
    """The slots on one server, for all threads and event loops of this process. Waiters are served in order.

    A full server rejects new sessions instead of queueing them, so we queue here. After the first rejection, this
    process opens at most as many sessions as have run at the same time before, and every `PROBE_S` one more.

    Example: 64 episodes start and the server has 8 slots. 8 sessions run and 56 are rejected, so `_max_playing` is 8.
    The rejected ones queue, and each session that ends hands its slot to the next. `PROBE_S` later, a ninth is tried.
    If it is rejected, the limit stays 8. If another client has left meanwhile, the limit becomes 9.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._max_sessions: int | None = None
        self._n_taken = 0
        self._n_playing = 0
        self._max_playing = 0  # the maximum of `_n_playing` so far
        self._refused_at = -math.inf
        self._was_refused = False

    async def acquire(self, max_sessions: int | None) -> None:
        """Wait for a slot, without a time limit. The caller must `release` it in any case."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future())
        with self._lock:
            self._max_sessions = max_sessions
            self._waiting.append(waiter)
        self._admit()
        try:
            while not waiter.has_slot:
                await asyncio.wait([waiter.is_admitted], timeout=PROBE_S)
                self._admit()
        except BaseException:
            with self._lock:
                if waiter.has_slot:
                    self._n_taken -= 1
                elif waiter in self._waiting:
                    self._waiting.remove(waiter)
            self._admit()
            raise

    def record_accepted(self) -> None:
        """Record that the server accepted the session in a slot."""
        with self._lock:
            self._n_playing += 1
            self._max_playing = max(self._max_playing, self._n_playing)
        self._admit()

    def record_refused(self) -> bool:
        """Record that the server was full. Return True if the caller should release its slot and queue again."""
        with self._lock:
            self._was_refused, self._refused_at = True, time.monotonic()
            return self._n_taken > max(1, self._max_playing)

    def release(self, *, was_playing: bool) -> None:
        """Release a slot for the next waiter."""
        with self._lock:
            self._n_taken -= 1
            self._n_playing -= was_playing
        self._admit()

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and self._n_taken < self._limit():
                waiter = self._waiting.popleft()
                if waiter.loop.is_closed():  # its coroutine is gone
                    continue
                self._n_taken += 1
                waiter.has_slot = True
                waiter.loop.call_soon_threadsafe(_wake, waiter.is_admitted)

    def _limit(self) -> float:
        configured = math.inf if self._max_sessions is None else self._max_sessions
        if not self._was_refused:
            return configured
        may_probe = time.monotonic() - self._refused_at > PROBE_S
        return min(configured, max(1, self._max_playing) + may_probe)


def _wake(is_admitted: asyncio.Future[None]) -> None:
    if not is_admitted.done():
        is_admitted.set_result(None)


_slots: dict[str, SessionSlots] = {}
_slots_lock = threading.Lock()


def slots_for(url: str) -> SessionSlots:
    """Return the slots of the server at `url`, shared by all callers in this process."""
    with _slots_lock:
        return _slots.setdefault(url, SessionSlots())
