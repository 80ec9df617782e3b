"""The dispatchers that task files can name. Their limits hold across concurrent calls of `run`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Protocol

from skyrl_agent.config import DispatcherConfig, DispatcherLimits
from skyrl_train.concurrency import gather_or_cancel


class Trajectory(Protocol):
    """The phases of a trajectory. They do not raise, and do nothing after a phase that failed."""

    env: str | None

    async def initialize_trajectory(self) -> None: ...

    async def generate_trajectory(self) -> None: ...

    async def evaluate_trajectory(self) -> None: ...

    async def close(self) -> None: ...


class Dispatcher(ABC):
    """The order and the limits in which trajectories are played."""

    def __init__(self, limits: DispatcherLimits) -> None:
        n_parallel = limits.max_parallel_agents
        self._agents = asyncio.Semaphore(n_parallel)
        self._evaluations = asyncio.Semaphore(limits.max_eval_parallel_agents or n_parallel)

    async def run(self, trajectories: Iterable[Trajectory]) -> None:
        """Play trajectories to their end; on cancellation, too, their runtimes are closed."""
        await gather_or_cancel(self._play_and_close(trajectory) for trajectory in trajectories)

    async def _play_and_close(self, trajectory: Trajectory) -> None:
        try:
            await self._play(trajectory)
        finally:
            await trajectory.close()

    @abstractmethod
    async def _play(self, trajectory: Trajectory) -> None:
        """Run the three phases of a trajectory."""


class AsyncPipeline(Dispatcher):
    """Separate limits for initialization, generation and evaluation, so that all three overlap.

    At most `max_parallel_agents` trajectories generate, while as many others have a runtime or are starting one.
    """

    def __init__(self, limits: DispatcherLimits) -> None:
        super().__init__(limits)
        self._initializations = asyncio.Semaphore(limits.max_parallel_agents)

    async def _play(self, trajectory: Trajectory) -> None:
        async with AsyncExitStack() as waiting:
            await waiting.enter_async_context(self._initializations)
            await trajectory.initialize_trajectory()
            async with self._agents:
                await waiting.aclose()
                await trajectory.generate_trajectory()
        async with self._evaluations:
            await trajectory.evaluate_trajectory()


class AsyncBatch(Dispatcher):
    """One limit for trajectories from their initialization to the end of their evaluation."""

    async def _play(self, trajectory: Trajectory) -> None:
        async with self._agents:
            await trajectory.initialize_trajectory()
            await trajectory.generate_trajectory()
            async with self._evaluations:
                await trajectory.evaluate_trajectory()


class AsyncFixPool(Dispatcher):
    """A fixed pool of environments: each trajectory has one of them for itself until its agent has ended."""

    def __init__(self, limits: DispatcherLimits, envs: Iterable[str]) -> None:
        super().__init__(limits)
        self._envs: asyncio.LifoQueue[str] = asyncio.LifoQueue()
        for env in envs:
            self._envs.put_nowait(env)

    async def _play(self, trajectory: Trajectory) -> None:
        async with self._agents:
            trajectory.env = await self._envs.get()
            try:
                await trajectory.initialize_trajectory()
                await trajectory.generate_trajectory()
            finally:
                await trajectory.close()
                self._envs.put_nowait(trajectory.env)
        async with self._evaluations:
            await trajectory.evaluate_trajectory()


DISPATCHERS: dict[str, type[Dispatcher]] = {
    "async_pipeline": AsyncPipeline,
    "async_batch": AsyncBatch,
    "async_fix_pool": AsyncFixPool,
}
"""The values of `dispatcher.type`."""


def create_dispatcher(cfg: DispatcherConfig, *, is_training: bool) -> Dispatcher:
    """Create the dispatcher of a task file, with the limits of training or of evaluations."""
    limits = cfg if is_training or cfg.val_config is None else cfg.val_config
    if cfg.type == "async_fix_pool":
        return AsyncFixPool(limits, cfg.envs)
    return DISPATCHERS[cfg.type](limits)
