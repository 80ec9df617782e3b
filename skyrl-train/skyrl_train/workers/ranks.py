"""The driver's interface to a rank, and its implementation within this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Any, Protocol

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.distributed import DistributedStrategy
from skyrl_train.types.specs import ModelSpec
from skyrl_train.workers.worker import Worker


class Rank(Protocol):
    """One rank of a worker group."""

    async def load(self, spec: ModelSpec, objective: Objective | None) -> None:
        """Load a model, replacing the previous one."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank's worker and return its result."""
        ...

    async def close(self) -> None:
        """End the rank."""
        ...


class LocalRank:
    """The only rank of a model, in this process. Its calls run in `executor`, on a single thread."""

    worker: Worker

    def __init__(self, executor: Executor, strategy: DistributedStrategy[Any]) -> None:
        self._executor = executor
        self._strategy = strategy

    async def load(self, spec: ModelSpec, objective: Objective | None) -> None:
        loop = asyncio.get_running_loop()
        self.worker = await loop.run_in_executor(self._executor, Worker, spec, self._strategy, objective)

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, getattr(self.worker, method), *args)

    async def close(self) -> None:
        await self.call("close")
