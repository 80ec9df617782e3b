from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from skyrl_gym.adapters.background_loop import BackgroundLoop


def test_coroutines_run_in_one_loop_until_it_is_closed() -> None:
    n_threads = threading.active_count()
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
    assert threading.active_count() == n_threads


def test_errors_are_propagated() -> None:
    background = BackgroundLoop("test")

    async def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        background.run(fail())
    background.close()


async def test_runs_beside_another_loop() -> None:
    background = BackgroundLoop("test")

    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    assert background.run(answer()) == 42
    background.close()


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[Errno 24] Too many open files 1\n"
