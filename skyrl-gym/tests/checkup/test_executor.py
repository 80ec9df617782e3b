from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest
from gym_kit.processes import wait_until

from skyrl_gym.checkup.executor import EnvCall, Executor


def value_of(executor: Executor, function: Any, is_async: bool = False) -> Any:
    (result,) = executor.run([EnvCall(function, is_async)])
    assert (result.error, result.hangs_at) == (None, None)
    return result.value


async def current_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_threads_have_no_event_loop_and_coroutines_share_one_that_runs_between_calls() -> None:
    ended = threading.Event()

    async def later() -> None:
        await asyncio.sleep(0.001)
        ended.set()

    async def leave_a_task() -> asyncio.Task[None]:
        return asyncio.create_task(later())

    with Executor(2, limit_s=10) as executor:
        (result,) = executor.run([EnvCall(asyncio.get_event_loop)])
        assert isinstance(result.error, RuntimeError)
        task = value_of(executor, leave_a_task, is_async=True)
        assert ended.wait(timeout=60)
        assert value_of(executor, current_loop, is_async=True) is task.get_loop()


def test_only_the_first_lines_are_slowed_down() -> None:
    def count() -> int:
        return [n_lines := n for n in range(1_000_000)][-1] + n_lines

    with Executor(2, limit_s=100) as executor:  # a million slow lines would take longer
        assert [result.value for result in executor.run([EnvCall(count)] * 2)] == [1_999_998] * 2
        tracers = [value_of(executor, sys.gettrace) for _ in range(2)]
    assert tracers == [None, None]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_raised_error_is_the_result_and_later_calls_work(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def fail_async() -> None:
        raise error

    with Executor(1, limit_s=10) as executor:
        results = executor.run([EnvCall(fail), EnvCall(fail_async, is_async=True)])
        assert [result.error for result in results] == [error, error]
        assert value_of(executor, lambda: 3) == 3
        assert value_of(executor, current_loop, is_async=True)
        (result,) = executor.run([EnvCall(lambda: time.sleep(0.05))])
        assert result.seconds >= 0.05


def test_hanging_calls_are_reported_with_their_stacks_and_coroutines_are_cancelled() -> None:
    released = threading.Event()
    ends: list[str] = []

    def hang() -> None:
        released.wait()

    async def numbers() -> Any:
        await asyncio.Event().wait()
        yield 1

    async def hang_async() -> None:
        try:
            await anext(numbers())
        finally:
            ends.append("cancelled")

    with Executor(2, limit_s=0.1) as executor:
        calls = [EnvCall(hang), EnvCall(hang_async, is_async=True), EnvCall(lambda: 3)]
        in_thread, in_loop, done = executor.run(calls)
        assert executor.is_stuck
        assert done.value == 3
        lines = (in_thread.hangs_at or "").split("\n")
        assert "test_executor.py, line" in lines[0]
        assert lines[0].endswith("in hang: released.wait()")
        assert lines[-1].startswith("  threading.py, line")
        assert "in hang_async: await anext(numbers())" in (in_loop.hangs_at or "")
        released.set()
    assert ends == ["cancelled"]


def test_finished_call_keeps_nothing_alive() -> None:
    class Held:
        is_alive = True

        def __del__(self) -> None:
            Held.is_alive = False

    with Executor(1, limit_s=10) as executor:
        executor.run([EnvCall(Held)])
        wait_until(lambda: not Held.is_alive)
