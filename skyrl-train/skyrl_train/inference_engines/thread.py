"""The thread in which an engine computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """One thread, the engine's own or one that it shares with a trainer: see `compute_thread`."""

    def __init__(self, shared: ThreadPoolExecutor | None, name: str) -> None:
        """`shared` has one thread; None for one called `name`."""
        self._executor = shared or ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._is_own = shared is None

    def begin(self, function: Callable[..., T], *args: Any) -> T:
        """What `function` returns, for constructors. If it raises, a thread of the engine's own ends."""
        try:
            return self._executor.submit(function, *args).result()
        except BaseException:
            self.close()
            raise

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function` returns, when its turn has come."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """End the thread, if it is the engine's own."""
        if self._is_own:
            self._executor.shutdown()
