from __future__ import annotations

import asyncio
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from skyrl_gym.executor import Call, Executor, Outcome


def value_of(executor: Executor, function: Any, is_awaited: bool = False) -> Any:
    (outcome,) = executor.run([Call(function, is_awaited)])
    assert (outcome.error, outcome.hangs_at) == (None, None)
    return outcome.value


async def current_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_calls_change_threads_and_none_is_the_main_one() -> None:
    before = set(threading.enumerate())
    with Executor(2, limit_s=10) as executor:
        threads = [value_of(executor, threading.current_thread) for _ in range(4)]
        awaited = value_of(executor, current_loop, is_awaited=True)
    assert threads[0] is threads[2] is not threads[1] is threads[3]
    assert threading.main_thread() not in threads
    assert awaited.is_closed()
    assert set(threading.enumerate()) <= before


def test_threads_have_no_event_loop_and_what_is_awaited_has_one_for_all_that_turns_between_calls() -> None:
    ended = threading.Event()

    async def leave_a_task() -> asyncio.Task[None]:
        return asyncio.create_task(later())

    async def later() -> None:
        await asyncio.sleep(0.001)
        ended.set()

    with Executor(2, limit_s=10) as executor:
        (outcome,) = executor.run([Call(asyncio.get_event_loop)])
        assert isinstance(outcome.error, RuntimeError)
        task = value_of(executor, leave_a_task, is_awaited=True)
        assert ended.wait(timeout=60)
        assert value_of(executor, current_loop, is_awaited=True) is task.get_loop()


def test_calls_at_once_meet() -> None:
    meeting = threading.Barrier(3)
    both_are_in, n_in = asyncio.Event(), [0]

    async def meet() -> int:
        n_in[0] += 1
        if n_in[0] == 2:
            both_are_in.set()
        await both_are_in.wait()
        return n_in[0]

    with Executor(3, limit_s=10) as executor:
        outcomes = executor.run([*[Call(meeting.wait)] * 3, *[Call(meet, is_awaited=True)] * 2])
    assert sorted(outcome.value for outcome in outcomes[:3]) == [0, 1, 2]
    assert [outcome.value for outcome in outcomes[3:]] == [2, 2]


def test_calls_at_once_meet_between_two_lines() -> None:
    last = [0]

    def is_met(number: int) -> bool:
        last[0] = number
        return last[0] != number

    with Executor(4, limit_s=10) as executor:
        for _ in range(20):
            outcomes = executor.run([Call(partial(is_met, number)) for number in range(4)])
            assert any(outcome.value for outcome in outcomes)
            assert not any(executor.run([Call(partial(is_met, number))])[0].value for number in range(4))


def test_no_more_than_the_first_lines_are_slow() -> None:
    def count() -> int:
        n_lines = 0
        for _ in range(1_000_000):
            n_lines += 1
        return n_lines

    tracers = []
    with Executor(2, limit_s=100) as executor:  # a million slow lines would take longer
        assert [outcome.value for outcome in executor.run([Call(count)] * 2)] == [1_000_000] * 2
        tracers = [outcome.value for outcome in executor.run([Call(sys.gettrace)]) for _ in range(2)]
    assert tracers == [None, None]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_a_call_raises_is_its_outcome_and_calls_go_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def fail_awaited() -> None:
        raise error

    with Executor(1, limit_s=10) as executor:
        outcomes = executor.run([Call(fail), Call(fail_awaited, is_awaited=True)])
        assert [outcome.error for outcome in outcomes] == [error, error]
        assert value_of(executor, lambda: 3) == 3
        assert value_of(executor, current_loop, is_awaited=True)


def test_a_call_is_timed() -> None:
    with Executor(1, limit_s=10) as executor:
        (outcome,) = executor.run([Call(lambda: time.sleep(0.05))])
    assert outcome.seconds >= 0.05


def hang_in_a_function(released: threading.Event) -> None:
    released.wait()


async def hang_awaited() -> None:
    await anext(numbers())


async def numbers() -> Any:
    await asyncio.Event().wait()
    yield 1


def test_a_call_that_hangs_is_left_with_the_lines_that_it_is_in() -> None:
    released = threading.Event()
    with Executor(2, limit_s=0.1) as executor:
        hanging, done = executor.run([Call(lambda: hang_in_a_function(released)), Call(lambda: 3)])
        assert executor.is_stuck
        assert done.value == 3
        lines = (hanging.hangs_at or "").split("\n")
        assert "test_executor.py, line" in lines[0]
        assert lines[1].endswith("in hang_in_a_function: released.wait()")
        assert lines[-1].startswith("  threading.py, line")
        released.set()


def test_what_is_awaited_and_hangs_is_cancelled_at_the_end() -> None:
    ends: list[str] = []

    async def hang() -> None:
        try:
            await hang_awaited()
        finally:
            ends.append("cancelled")

    with Executor(1, limit_s=0.1) as executor:
        (outcome,) = executor.run([Call(hang, is_awaited=True)])
    assert "in hang: await hang_awaited()\n" in (outcome.hangs_at or "")
    assert "in hang_awaited: await anext(numbers())" in (outcome.hangs_at or "")
    assert ends == ["cancelled"]


def test_who_keeps_the_event_loop_is_named_for_all() -> None:
    released = threading.Event()

    async def keep() -> None:
        released.wait()

    with Executor(1, limit_s=0.1) as executor:
        outcomes = executor.run([Call(keep, is_awaited=True), Call(current_loop, is_awaited=True)])
        released.set()
    assert all("in keep: released.wait()" in (outcome.hangs_at or "") for outcome in outcomes)


def test_an_event_loop_that_a_call_stops_goes_on() -> None:
    async def stop() -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return 3

    with Executor(1, limit_s=10) as executor:
        assert not executor.was_stopped
        assert executor.run([Call(stop, is_awaited=True)])[0].value == 3
        assert executor.was_stopped


def test_the_next_call_finds_nothing_of_the_one_before() -> None:
    class Held:
        is_alive = True

        def __del__(self) -> None:
            Held.is_alive = False

    with Executor(1, limit_s=10) as executor:
        executor.run([Call(Held)])
        deadline = time.monotonic() + 60
        while Held.is_alive and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not Held.is_alive


def test_an_outcome_is_empty_by_default() -> None:
    assert Outcome() == Outcome(None, None, None, 0.0)
