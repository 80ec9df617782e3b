"""How many sessions this process opens on a server at once: as many as it was told to, or as it found room for."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from dataclasses import dataclass

PROBE_S = 10.0
"""How long after a refusal one more session is tried: whoever held the other places may be gone."""


@dataclass(slots=True, eq=False)
class _Turn:
    """Somebody who waits for a place, in an event loop of their own."""

    loop: asyncio.AbstractEventLoop
    is_admitted: asyncio.Future[None]
    has_place: bool = False


class Places:
    """The places on one server, for all threads and event loops of this process. First come, first served.

    A server that is full refuses at once, and nobody there queues. So the queue is here: after a first refusal, no more
    sessions are opened than were once played at the same time, and one more now and then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Turn] = deque()
        self._max_sessions: int | None = None
        self._n_taken = 0
        self._n_playing = 0
        self._most = 0  # that ever played at the same time
        self._refused_at = -math.inf
        self._was_refused = False

    async def take(self, max_sessions: int | None) -> None:
        """Wait for a place, for as long as it takes; `give_back` it, whatever comes of it."""
        loop = asyncio.get_running_loop()
        turn = _Turn(loop, loop.create_future())
        with self._lock:
            self._max_sessions = max_sessions
            self._waiting.append(turn)
        self._admit()
        try:
            while not turn.has_place:
                await asyncio.wait([turn.is_admitted], timeout=PROBE_S)
                self._admit()
        except BaseException:
            self._withdraw(turn)
            raise

    def accepted(self) -> None:
        """The server has made an environment for one who has a place."""
        with self._lock:
            self._n_playing += 1
            self._most = max(self._most, self._n_playing)
        self._admit()

    def refused(self) -> bool:
        """The server had no room for one who has a place; whether to give the place back, and queue again."""
        with self._lock:
            self._was_refused, self._refused_at = True, time.monotonic()
            return self._n_taken > max(1, self._most)

    def give_back(self, *, was_playing: bool) -> None:
        """Leave the place to the next."""
        with self._lock:
            self._n_taken -= 1
            self._n_playing -= was_playing
        self._admit()

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and self._n_taken < self._limit():
                turn = self._waiting.popleft()
                if turn.loop.is_closed():  # nobody waits there any more
                    continue
                self._n_taken += 1
                turn.has_place = True
                turn.loop.call_soon_threadsafe(_wake, turn.is_admitted)

    def _withdraw(self, turn: _Turn) -> None:
        with self._lock:
            if turn.has_place:
                self._n_taken -= 1
            elif turn in self._waiting:
                self._waiting.remove(turn)
        self._admit()

    def _limit(self) -> float:
        told = math.inf if self._max_sessions is None else self._max_sessions
        if not self._was_refused:
            return told
        is_old = time.monotonic() - self._refused_at > PROBE_S
        return min(told, max(1, self._most) + is_old)


def _wake(is_admitted: asyncio.Future[None]) -> None:
    if not is_admitted.done():
        is_admitted.set_result(None)


_places: dict[str, Places] = {}
_places_lock = threading.Lock()


def places_of(url: str) -> Places:
    """The places on the server at `url`; the same for everyone in this process."""
    with _places_lock:
        return _places.setdefault(url, Places())
