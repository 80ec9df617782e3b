"""Clients that wait for results. One task queries the database for all of them when the engine signals new results.

It only queries recently finished requests, so its cost does not depend on the number of pending requests. Every
`BACKUP_SEC` it queries all pending requests, because signals may get lost and clocks may be wrong.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import SQLAlchemyError

logger = logging.getLogger(__name__)

Ids = set[int]
PAUSE_SEC = 0.005
"""Minimum seconds between two queries, so that a thousand signals do not cause a thousand queries."""

BACKUP_SEC = 1.0
"""Seconds between queries for all pending requests, because an engine may die between its commit and its signal. Also
the pause after a database error."""


class Promises:
    """Requests that clients are waiting for, in one event loop."""

    def __init__(self, pending_ids: Callable[[], Awaitable[Ids]], recent_ids: Callable[[], Awaitable[Ids]]) -> None:
        self._pending_ids = pending_ids
        self._recent_ids = recent_ids
        self._all_checked_at = 0.0
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._has_news = asyncio.Event()
        self.is_released = False

    @property
    def n_waiting(self) -> int:
        """Number of waiting clients."""
        return sum(len(waiting) for waiting in self._waiting.values())

    def wake(self) -> None:
        """Signal that there may be new results."""
        self._has_news.set()

    def release(self) -> None:
        """Wake all clients and make later waits return immediately, when the server stops or has lost its engine."""
        self.is_released = True
        for waiting in self._waiting.values():
            _resolve(waiting)

    async def wait(self, request_id: int, seconds: float) -> None:
        """Wait until a request is probably done, for at most `seconds`."""
        if self.is_released:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, set()).add(future)
        self._has_news.set()
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            pass
        finally:
            waiting = self._waiting.get(request_id, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(request_id, None)

    async def watch(self, poll_sec: Callable[[], float]) -> None:
        """Query forever: after each `wake`, and every `poll_sec()` seconds while clients wait."""
        while True:
            try:
                async with asyncio.timeout(poll_sec() if self._waiting else None):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            self._has_news.clear()
            if self._waiting:
                await self._query()
                await asyncio.sleep(PAUSE_SEC)

    async def _query(self) -> None:
        """Wake the clients of finished requests."""
        try:
            if time.monotonic() - self._all_checked_at < BACKUP_SEC:
                done = await self._recent_ids()
            else:
                waiting = set(self._waiting)
                done = waiting - await self._pending_ids()
                self._all_checked_at = time.monotonic()
        except SQLAlchemyError:
            logger.exception("failed to query the database for results; retrying")
            await asyncio.sleep(BACKUP_SEC)
            return
        for request_id in done & self._waiting.keys():
            _resolve(self._waiting[request_id])


def _resolve(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
