import asyncio
import sys
import threading
from functools import partial
from typing import Any

from gym_kit.processes import wait_until

from skyrl_gym.checkup.executor import EnvCall, Executor


def value_of(executor: Executor, function: Any, is_async: bool = False) -> Any:
    (result,) = executor.run([EnvCall(function, is_async)])
    assert (result.error, result.hangs_at) == (None, None)
    return result.value


def test_concurrent_calls_interleave_between_two_lines() -> None:
    last = [0]

    def is_met(number: int) -> bool:
        last[0] = number
        return last[0] != number

    n_rounds_met = 0
    with Executor(4, limit_s=10) as executor:
        for _ in range(20):
            results = executor.run([EnvCall(partial(is_met, number)) for number in range(4)])
            n_rounds_met += any(result.value for result in results)
            assert not any(executor.run([EnvCall(partial(is_met, number))])[0].value for number in range(4))
    assert n_rounds_met >= 5  # all 20 on a quiet machine


def test_only_the_first_lines_are_slowed_down() -> None:
    def count() -> int:
        return [n_lines := n for n in range(1_000_000)][-1] + n_lines

    with Executor(2, limit_s=100) as executor:  # a million slow lines would take longer
        assert [result.value for result in executor.run([EnvCall(count)] * 2)] == [1_999_998] * 2
        tracers = [value_of(executor, sys.gettrace) for _ in range(2)]
    assert tracers == [None, None]


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
