"""Waiting clients in one event loop; the test plays the database."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy.exc import OperationalError

from tx.tinker.server.promises import Promises


class Pending:
    """Pending ids, recently finished ones, and the number of queries. The first `n_failing` queries fail."""

    def __init__(self, *ids: int, n_failing: int = 0) -> None:
        self.ids = set(ids)
        self.recent: set[int] = set()
        self.n_queries = 0
        self._n_failing = n_failing

    async def query(self, ids: set[int]) -> set[int]:
        self.n_queries += 1
        await asyncio.sleep(0)
        if self.n_queries <= self._n_failing:
            raise OperationalError("select", {}, Exception("away"))
        return set(ids)


@asynccontextmanager
async def watched(pending: Pending, poll_sec: float = 60.0) -> AsyncIterator[Promises]:
    promises = Promises(lambda: pending.query(pending.ids), lambda: pending.query(pending.recent))
    task = asyncio.create_task(promises.watch(lambda: poll_sec))
    try:
        yield promises
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_ring_wakes_clients_whose_request_is_done() -> None:
    pending = Pending(1, 2)
    async with watched(pending) as promises:
        first, second = (asyncio.create_task(promises.wait(number, 60)) for number in (1, 2))
        await asyncio.sleep(0.05)
        assert promises.n_waiting == 2
        pending.ids.discard(1)
        pending.recent.add(1)
        promises.wake()
        await asyncio.wait_for(first, 20)
        assert not second.done()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert promises.n_waiting == 0


async def test_results_from_before_the_wait_are_found_without_a_ring() -> None:
    async with watched(Pending()) as promises:
        await asyncio.wait_for(promises.wait(7, 60), 20)


async def test_no_queries_without_waiting_clients() -> None:
    pending = Pending()
    async with watched(pending, poll_sec=0.001) as promises:
        promises.wake()
        await asyncio.sleep(0.05)
    assert pending.n_queries == 0


@pytest.mark.parametrize("is_recent", [True, False])
async def test_it_polls_without_rings(monkeypatch: pytest.MonkeyPatch, is_recent: bool) -> None:
    """Results that are not reported as recent, because the engine's clock is wrong, are found by the backup."""
    monkeypatch.setattr("tx.tinker.server.promises.BACKUP_SEC", 3600 if is_recent else 0.1)
    pending = Pending(1)
    async with watched(pending, poll_sec=0.02) as promises:
        task = asyncio.create_task(promises.wait(1, 60))
        await asyncio.sleep(0.05)
        pending.ids.discard(1)
        pending.recent |= {1} if is_recent else set()
        await asyncio.wait_for(task, 20)


async def test_waits_time_out() -> None:
    async with watched(Pending(1)) as promises:
        started = time.monotonic()
        await promises.wait(1, 0.05)
        assert 0.04 < time.monotonic() - started < 20
        task = asyncio.create_task(promises.wait(1, 60))
        await asyncio.sleep(0.01)
        promises.release()
        await asyncio.wait_for(task, 20)
        await asyncio.wait_for(promises.wait(1, 60), 20)


async def test_it_survives_an_unavailable_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tx.tinker.server.promises.BACKUP_SEC", 0.01)
    async with watched(Pending(n_failing=2), poll_sec=0.01) as promises:
        await asyncio.wait_for(promises.wait(1, 60), 20)
