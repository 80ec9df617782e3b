"""Who waits for which request. One task looks into the database for all of them, when the engine rings.

It looks for what was done in the last seconds, so that a look costs the same however many requests wait; and now and
then for all that is still to be done, since rings, and clocks, may fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import SQLAlchemyError

logger = logging.getLogger(__name__)

Ids = set[int]
PAUSE_SEC = 0.005
"""Between two looks, so that a thousand rings at once are not a thousand looks."""

BACKUP_SEC = 1.0
"""How often to look although nobody rang: an engine may die between its commit and its ring."""


class Promises:
    """Waiting requests of clients, in one event loop."""

    def __init__(self, still_pending: Callable[[], Awaitable[Ids]], done_lately: Callable[[], Awaitable[Ids]]) -> None:
        self._still_pending = still_pending
        self._done_lately = done_lately
        self._looked_at_all = 0.0
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._rung = asyncio.Event()
        self.is_released = False

    @property
    def n_waiting(self) -> int:
        """Clients that wait."""
        return sum(len(waiting) for waiting in self._waiting.values())

    def ring(self) -> None:
        """There may be results."""
        self._rung.set()

    def release(self) -> None:
        """Let everyone go, and nobody wait any more: the server ends, or has no engine."""
        self.is_released = True
        for waiting in self._waiting.values():
            _wake(waiting)

    async def wait(self, request_id: int, seconds: float) -> None:
        """Until a request is probably done, or for so many seconds."""
        if self.is_released:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, set()).add(future)
        self._rung.set()
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
        """For ever: look when rung, and every `poll_sec()` seconds while somebody waits."""
        while True:
            try:
                async with asyncio.timeout(poll_sec() if self._waiting else None):
                    await self._rung.wait()
            except TimeoutError:
                pass
            self._rung.clear()
            if self._waiting:
                await self._look()
                await asyncio.sleep(PAUSE_SEC)

    async def _look(self) -> None:
        try:
            done = await self._done()
        except SQLAlchemyError:
            logger.exception("the database could not be asked for results; trying again")
            await asyncio.sleep(BACKUP_SEC)
            return
        for request_id in done & self._waiting.keys():
            _wake(self._waiting[request_id])

    async def _done(self) -> Ids:
        """Of those that are waited for now, and perhaps more."""
        if time.monotonic() - self._looked_at_all < BACKUP_SEC:
            return await self._done_lately()
        waiting = set(self._waiting)
        pending = await self._still_pending()
        self._looked_at_all = time.monotonic()
        return waiting - pending


def _wake(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
