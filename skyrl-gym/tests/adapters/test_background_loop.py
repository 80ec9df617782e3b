from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from gym_kit.processes import no_leaks, run_python

from skyrl_gym.adapters.background_loop import BackgroundLoop


@pytest.fixture(autouse=True)
def check_no_threads_left() -> Iterator[None]:
    with no_leaks():
        yield


def test_coroutines_run_in_one_loop_until_it_is_closed() -> None:
    background = BackgroundLoop("test")
    events: list[str] = []

    async def start() -> asyncio.AbstractEventLoop:
        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                events.append("cancelled")

        loop = asyncio.get_running_loop()
        loop.tasks = [asyncio.create_task(forever())]  # type: ignore[attr-defined]
        await asyncio.to_thread(events.append, "in a thread")
        return loop

    async def same() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loop = background.run(start())
    assert background.run(same()) is loop
    assert loop.is_running()
    background.close()
    background.close()
    assert events == ["in a thread", "cancelled"]
    assert loop.is_closed()


def test_without_file_descriptors_it_raises_at_once() -> None:
    code = """
import os, resource, threading
from skyrl_gym.adapters.background_loop import BackgroundLoop
first_free = os.dup(0)
os.close(first_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, first_free))
try:
    BackgroundLoop("test")
except OSError as error:
    print(error, threading.active_count())
"""
    assert run_python(code).stdout == "[Errno 24] Too many open files 1\n"
