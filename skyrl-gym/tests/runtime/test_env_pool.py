import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from gym_kit.processes import wait_until_async

from skyrl_gym.error import EnvTimeout
from skyrl_gym.runtime import env_pool
from skyrl_gym.runtime.env_pool import ThreadPool

MakePool = Callable[..., ThreadPool]


@pytest.fixture
async def make_pool() -> AsyncIterator[MakePool]:
    """Create pools, close them after the test, and check that their threads have ended."""
    pools: list[ThreadPool] = []

    def make(max_threads: int = 4, limit_s: float | None = 5.0) -> ThreadPool:
        pools.append(ThreadPool(max_threads, limit_s, "test-pool"))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("test-pool")] == []


class Owner:
    """An object whose calls may be abandoned."""

    def __init__(self) -> None:
        self.is_stuck = False
        self.closed_in: list[str] = []

    def close_late(self) -> None:
        self.closed_in.append(threading.current_thread().name)


async def test_results_and_errors_reach_their_callers(make_pool: MakePool) -> None:
    pool = make_pool()

    def fail() -> None:
        raise OSError("no")

    answers = await asyncio.gather(
        *(pool.run(lambda i=i: i) for i in range(100)), pool.run(fail), return_exceptions=True
    )
    assert answers[:100] == list(range(100))
    assert isinstance(answers[100], OSError)


class NotAnException(BaseException):
    """A `BaseException` that is not an `Exception`."""


@pytest.mark.parametrize(
    "raised",
    [StopIteration("over"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), NotAnException("odd")],
)
async def test_exceptions_that_stop_event_loops_become_runtime_errors(
    make_pool: MakePool, raised: BaseException
) -> None:
    def call() -> None:
        raise raised

    pool = make_pool(max_threads=1, limit_s=None)
    thread = await pool.run(threading.current_thread)
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match=type(raised).__name__) as caught:
            await pool.run(call)
        assert await pool.run(threading.current_thread) is thread
    assert caught.value.__cause__ is raised


async def test_short_calls_share_a_thread(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_pool, "CHECK_S", 1.0)  # calls may wait longer on a busy machine
    pool = make_pool(max_threads=8)
    names = await asyncio.gather(*(pool.run(lambda: threading.current_thread().name) for _ in range(500)))
    assert len(set(names)) == 1


async def test_calls_that_block_briefly_share_several_threads(make_pool: MakePool) -> None:
    def block() -> str:
        time.sleep(0.001)
        return threading.current_thread().name

    pool = make_pool(max_threads=8)
    assert len(set(await asyncio.gather(*(pool.run(block) for _ in range(200))))) == 8


async def test_no_more_threads_than_the_maximum(make_pool: MakePool) -> None:
    pool, n_running, max_running = make_pool(max_threads=3), 0, 0
    barrier, lock = threading.Barrier(3, timeout=5), threading.Lock()

    def call() -> None:
        nonlocal n_running, max_running
        with lock:
            n_running += 1
            max_running = max(max_running, n_running)
        barrier.wait()
        with lock:
            n_running -= 1

    await asyncio.gather(*(pool.run(call) for _ in range(30)))
    assert max_running == 3


async def test_a_call_that_exceeds_the_limit_is_abandoned_and_its_thread_replaced(make_pool: MakePool) -> None:
    pool, owners, gate = make_pool(max_threads=2, limit_s=0.1), (Owner(), Owner()), threading.Event()
    late = await asyncio.gather(*(pool.run(gate.wait, owner) for owner in owners), return_exceptions=True)
    assert [(type(error), str(error)) for error in late] == [(EnvTimeout, "took longer than 0.1 s")] * 2
    assert [(owner.is_stuck, owner.closed_in) for owner in owners] == [(True, [])] * 2
    barrier = threading.Barrier(2, timeout=5)
    await asyncio.gather(*(pool.run(barrier.wait) for _ in range(2)))  # the pool still has two threads
    gate.set()
    await wait_until_async(lambda: all(owner.closed_in for owner in owners))
    closed_in = {name for owner in owners for name in owner.closed_in}
    assert closed_in == {"test-pool-0", "test-pool-1"}
    await wait_until_async(lambda: closed_in.isdisjoint(thread.name for thread in threading.enumerate()))


async def test_waiting_for_a_thread_does_not_count_towards_the_limit(make_pool: MakePool) -> None:
    pool = make_pool(max_threads=1, limit_s=0.5)
    await asyncio.gather(*(pool.run(lambda: time.sleep(0.2)) for _ in range(4)))


async def test_a_call_cancelled_in_the_queue_never_starts(make_pool: MakePool) -> None:
    pool, owner, gate, started_calls = make_pool(max_threads=1), Owner(), threading.Event(), []
    first = asyncio.create_task(pool.run(gate.wait))
    second = asyncio.create_task(pool.run(lambda: started_calls.append(1), owner))
    await wait_until_async(lambda: len(pool._calls) == 2)
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    gate.set()
    await first
    assert await pool.run(lambda: "after") == "after"
    assert (started_calls, owner.is_stuck, owner.closed_in) == ([], False, [])


async def test_a_call_cancelled_at_its_time_limit_is_cancelled(make_pool: MakePool) -> None:
    pool, gate, started_calls = make_pool(limit_s=0.0), threading.Event(), threading.Event()
    call = asyncio.create_task(pool.run(lambda: (started_calls.set(), gate.wait())))
    await asyncio.sleep(0)
    assert started_calls.wait(timeout=10)  # blocks the event loop, so no check runs in between
    call.cancel()
    pool._check(asyncio.get_running_loop())
    await asyncio.wait([call])
    assert call.cancelled()
    gate.set()


async def test_cancelled_calls_mark_their_owner_stuck_and_other_calls_complete(make_pool: MakePool) -> None:
    pool, rng = make_pool(max_threads=4, limit_s=None), random.Random(0)
    owners, started_calls = [Owner() for _ in range(120)], set[int]()

    def call(i: int) -> int:
        started_calls.add(i)
        ends = time.monotonic() + rng.random() / 100
        while time.monotonic() < ends:
            pass
        return i

    async with asyncio.timeout(60):
        for first in range(0, 120, 6):
            calls = [asyncio.create_task(pool.run(lambda i=i: call(i), owners[i])) for i in range(first, first + 6)]
            while first not in started_calls:
                await asyncio.sleep(0)
            for cancelled in calls[:3]:
                cancelled.cancel()
            await asyncio.wait(calls[:3])
            assert await asyncio.gather(*calls[3:]) == [first + 3, first + 4, first + 5]
    await wait_until_async(lambda: all(owner.closed_in for owner in owners if owner.is_stuck))
    assert all(len(owner.closed_in) == owner.is_stuck for owner in owners)
    assert any(owner.is_stuck for owner in owners)
    assert not any(owners[i].is_stuck for i in range(120) if i not in started_calls)


async def test_calls_to_a_closed_pool_raise(make_pool: MakePool) -> None:
    pool, owner, gate, started_calls = (
        make_pool(max_threads=1, limit_s=None),
        Owner(),
        threading.Event(),
        threading.Event(),
    )
    running = asyncio.create_task(pool.run(lambda: (started_calls.set(), gate.wait()), owner))
    queued = asyncio.create_task(pool.run(gate.wait))
    await wait_until_async(started_calls.is_set)
    closing = asyncio.create_task(pool.close())
    async with asyncio.timeout(10):
        for call in (running, queued, pool.run(lambda: "late")):
            with pytest.raises(RuntimeError, match=r"call close\(\) after the last call"):
                await call
        gate.set()
        await closing
    assert owner.closed_in == ["test-pool-0"]


async def test_stuck_threads_are_counted_when_the_pool_is_closed(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_pool, "JOIN_S", 0.1)
    gate, pool = threading.Event(), make_pool(max_threads=1, limit_s=0.05)
    with pytest.raises(EnvTimeout):
        await pool.run(gate.wait)
    with caplog.at_level(logging.WARNING):
        await pool.close()
    assert "1 threads are stuck in calls that never returned" in caplog.text
    assert "environment.skyrl_gym.isolation=process" in caplog.text
    gate.set()
    await wait_until_async(lambda: not any(thread.name.startswith("test-pool") for thread in threading.enumerate()))
