"""Blocking calls in threads: bounded, interrupted where that is possible, and none of them in another's way."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from skyrl_train.generators import call_pool
from skyrl_train.generators.call_pool import CallPool, CallTimeout

Make = Callable[..., CallPool]


@pytest.fixture
async def make_pool() -> AsyncIterator[Make]:
    """Makes pools; none of their threads is left after the test."""
    before = set(threading.enumerate())
    pools: list[CallPool] = []

    def make(n_workers: int = 4, limit_s: float | None = 5.0) -> CallPool:
        pools.append(CallPool(n_workers, limit_s, "pool"))
        return pools[-1]

    yield make
    for pool in pools:
        await asyncio.to_thread(pool.close)
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("pool")]
    assert not left


class Owner:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def lose(self) -> None:
        self.told.append(("lose", threading.current_thread().name))

    def clean_up(self) -> None:
        self.told.append(("clean_up", threading.current_thread().name))


async def test_answers_and_errors_reach_their_callers(make_pool: Make) -> None:
    pool = make_pool()

    def fail() -> None:
        raise OSError("no")

    answers = await asyncio.gather(
        *(pool.run(lambda i=i: i) for i in range(100)), pool.run(fail), return_exceptions=True
    )
    assert answers[:100] == list(range(100))
    assert isinstance(answers[100], OSError)


class Unusual(BaseException):
    """No `Exception`."""


@pytest.mark.parametrize(
    "raised", [StopIteration("over"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Unusual("odd")]
)
async def test_what_an_event_loop_must_not_see_becomes_an_error(make_pool: Make, raised: BaseException) -> None:
    def call() -> None:
        raise raised

    pool = make_pool(n_workers=1, limit_s=None)
    thread = await pool.run(threading.current_thread)
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match=type(raised).__name__) as caught:
            await pool.run(call)
        assert await pool.run(threading.current_thread) is thread
    assert caught.value.__cause__ is raised


async def test_calls_that_compute_share_one_thread(make_pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_pool, "BLOCKED_S", 60.0)  # on a busy machine, calls that compute take long as well
    pool = make_pool(n_workers=8)
    names = await asyncio.gather(*(pool.run(lambda: threading.current_thread().name) for _ in range(500)))
    assert len(set(names)) == 1


async def test_calls_that_block_run_beside_each_other(make_pool: Make) -> None:
    pool = make_pool(n_workers=16)
    barrier = threading.Barrier(17, timeout=60)  # each waits for all others
    await asyncio.gather(*(pool.run(barrier.wait) for _ in range(16)), asyncio.to_thread(barrier.wait))


@pytest.mark.parametrize("seconds", [0.001, 0.004, 0.02])
async def test_calls_that_block_for_a_moment_run_beside_each_other(make_pool: Make, seconds: float) -> None:
    assert await max_running(make_pool(n_workers=32), 400, seconds) > 4


async def test_no_more_threads_than_workers(make_pool: Make) -> None:
    assert await max_running(make_pool(n_workers=3), 30, 0.02) == 3


async def max_running(pool: CallPool, n_calls: int, seconds: float) -> int:
    """Return how many of `n_calls` that sleep for `seconds` ran at the same time."""
    n_running, n_max, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal n_running, n_max
        with lock:
            n_running += 1
            n_max = max(n_max, n_running)
        time.sleep(seconds)
        with lock:
            n_running -= 1

    await asyncio.gather(*(pool.run(call) for _ in range(n_calls)))
    return n_max


async def test_a_call_that_takes_too_long_is_interrupted_and_its_thread_replaced(make_pool: Make) -> None:
    pool, owner = make_pool(n_workers=1, limit_s=0.1), Owner()

    def spin() -> None:
        while True:
            time.sleep(0.005)

    with pytest.raises(CallTimeout, match=r"longer than 0\.1 s"):
        await pool.run(spin, owner)
    assert owner.told[0] == ("lose", "MainThread")
    assert await pool.run(lambda: "next") == "next"
    async with asyncio.timeout(60):
        while len(owner.told) < 2:
            await asyncio.sleep(0.01)
    assert owner.told[1][0] == "clean_up"
    assert owner.told[1][1].startswith("pool")


async def test_waiting_for_a_thread_does_not_count(make_pool: Make) -> None:
    pool = make_pool(n_workers=1, limit_s=1.0)
    await asyncio.gather(*(pool.run(lambda: time.sleep(0.3)) for _ in range(5)))


async def test_a_cancelled_call_that_had_not_begun_never_begins(make_pool: Make) -> None:
    pool, owner, begun = make_pool(n_workers=1, limit_s=None), Owner(), []
    released = threading.Event()
    first = asyncio.create_task(pool.run(lambda: released.wait(60)))
    second = asyncio.create_task(pool.run(lambda: begun.append(1), owner))
    await asyncio.sleep(0.01)
    second.cancel()
    released.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await pool.run(lambda: "after") == "after"
    assert (begun, owner.told) == ([], [])


async def test_a_cancelled_call_in_the_middle_is_lost_to_its_owner(make_pool: Make) -> None:
    pool, owner = make_pool(limit_s=None), Owner()
    has_begun, released = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        released.wait(60)

    call = asyncio.create_task(pool.run(wait, owner))
    assert await asyncio.to_thread(has_begun.wait, 60)
    call.cancel()
    await asyncio.wait([call])
    assert owner.told == [("lose", "MainThread")]
    released.set()


async def test_whenever_a_call_is_cancelled_its_owner_knows_and_the_others_are_answered(make_pool: Make) -> None:
    pool, rng = make_pool(n_workers=4, limit_s=None), random.Random(0)
    owners, begun = [Owner() for _ in range(300)], set[int]()

    def call(i: int) -> int:
        begun.add(i)
        ends = time.monotonic() + rng.random() / 100
        while time.monotonic() < ends:
            pass
        return i

    async with asyncio.timeout(60):
        for first in range(0, 300, 6):
            calls = [asyncio.create_task(pool.run(lambda i=i: call(i), owners[i])) for i in range(first, first + 6)]
            while first not in begun:
                await asyncio.sleep(0)
            for cancelled in calls[:3]:
                cancelled.cancel()
            await asyncio.wait(calls[:3])
            assert await asyncio.gather(*calls[3:]) == [first + 3, first + 4, first + 5]
        while any(len(owner.told) == 1 for owner in owners):
            await asyncio.sleep(0.01)
    told = [[what for what, _ in owner.told] for owner in owners]
    assert all(what in ([], ["lose", "clean_up"]) for what in told)
    assert any(told)
    assert not any(told[i] for i in range(300) if i not in begun)


async def test_a_closed_pool_answers_with_an_error(make_pool: Make) -> None:
    pool = make_pool(n_workers=1, limit_s=None)
    has_begun, released = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        released.wait(60)

    running, queued = (asyncio.create_task(pool.run(wait)) for _ in range(2))
    assert await asyncio.to_thread(has_begun.wait, 60)
    threading.Timer(0.3, released.set).start()
    await asyncio.to_thread(pool.close)
    async with asyncio.timeout(60):
        for call in (running, queued, pool.run(lambda: "late")):
            with pytest.raises(RuntimeError, match=r"close\(\) comes after the last call"):
                await call


async def test_a_thread_that_nothing_can_interrupt_is_named(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    pool = CallPool(1, 0.05, "stuck")
    with pytest.raises(CallTimeout):
        await pool.run(gate.wait)
    with caplog.at_level(logging.WARNING):
        await asyncio.to_thread(pool.close)
    assert "1 calls never returned and their threads are left behind: stuck-0" in caplog.text
    assert "environment.skyrl_gym.isolation=process" in caplog.text
    gate.set()
