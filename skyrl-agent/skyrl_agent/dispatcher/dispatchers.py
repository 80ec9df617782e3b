"""Dispatchers that task files can name. Their limits hold across concurrent calls of `run`."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Protocol

from skyrl_agent.config import DispatcherConfig, DispatcherLimits
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.types.tokens import Phase


class Playable(Protocol):
    """The phases of a trajectory. They never raise, and do nothing after a failed phase."""

    env: str | None

    @property
    def has_failed(self) -> bool: ...

    async def initialize_trajectory(self) -> None: ...

    async def generate_trajectory(self) -> None: ...

    async def evaluate_trajectory(self) -> None: ...

    async def close(self) -> None: ...


class TrajectoryDispatcher(ABC):
    """Base class for dispatchers. They decide in which order, and how many at a time, trajectories run."""

    def __init__(self, limits: DispatcherLimits) -> None:
        n_parallel = limits.max_parallel_agents
        self._agents = asyncio.Semaphore(n_parallel)
        self._evaluations = asyncio.Semaphore(limits.max_eval_parallel_agents or n_parallel)

    async def run(self, trajectories: Iterable[Playable]) -> None:
        """Run trajectories to completion. Cancellation also closes their runtimes."""
        await gather_or_cancel(self._play(trajectory) for trajectory in trajectories)

    @abstractmethod
    async def _play(self, trajectory: Playable) -> None:
        """Run a trajectory's phases. Close it before its evaluation, or on cancellation."""

    async def _evaluate(self, trajectory: Playable) -> None:
        if not trajectory.has_failed:
            async with self._evaluations:
                await trajectory.evaluate_trajectory()


class AsyncPipeline(TrajectoryDispatcher):
    """Separate limits for initialization, generation and evaluation, so that all three overlap.

    At most `max_parallel_agents` trajectories generate, while as many more have a runtime or are starting one. With a
    limit of 2, trajectories 0 and 1 generate, 2 and 3 already have their containers, and 4 waits. When 0 finishes, 2
    generates immediately, 4 starts its container, and the evaluation of 0 does not hold up either.
    """

    def __init__(self, limits: DispatcherLimits) -> None:
        super().__init__(limits)
        self._initializations = asyncio.Semaphore(limits.max_parallel_agents)

    async def _play(self, trajectory: Playable) -> None:
        async with AsyncExitStack() as stack:
            waiting = await stack.enter_async_context(AsyncExitStack())
            await waiting.enter_async_context(self._initializations)
            stack.push_async_callback(trajectory.close)
            await trajectory.initialize_trajectory()
            if not trajectory.has_failed:
                async with self._agents:
                    await waiting.aclose()
                    await trajectory.generate_trajectory()
                    await trajectory.close()
        await self._evaluate(trajectory)


class AsyncBatch(TrajectoryDispatcher):
    """One limit on trajectories from their initialization to the end of their evaluation."""

    async def _play(self, trajectory: Playable) -> None:
        async with self._agents:
            try:
                await trajectory.initialize_trajectory()
                await trajectory.generate_trajectory()
            finally:
                await trajectory.close()
            await self._evaluate(trajectory)


class AsyncFixPool(TrajectoryDispatcher):
    """A fixed pool of environments. Each trajectory has one for itself until its agent ends."""

    def __init__(self, limits: DispatcherLimits, envs: asyncio.LifoQueue[str]) -> None:
        super().__init__(limits)
        self._envs = envs

    async def _play(self, trajectory: Playable) -> None:
        async with self._agents:
            env = trajectory.env = await self._envs.get()
            try:
                await trajectory.initialize_trajectory()
                await trajectory.generate_trajectory()
            finally:
                try:
                    await trajectory.close()
                finally:
                    self._envs.put_nowait(env)
        await self._evaluate(trajectory)


def create_dispatchers(cfg: DispatcherConfig) -> dict[Phase, TrajectoryDispatcher]:
    """Create the dispatchers for training and evaluation. They share a fixed pool."""
    limits: dict[Phase, DispatcherLimits] = {"train": cfg, "eval": cfg.val_config or cfg}
    if cfg.type == "async_pipeline":
        return {phase: AsyncPipeline(one) for phase, one in limits.items()}
    if cfg.type == "async_batch":
        return {phase: AsyncBatch(one) for phase, one in limits.items()}
    envs: asyncio.LifoQueue[str] = asyncio.LifoQueue()
    for env in cfg.envs:
        envs.put_nowait(env)
    return {phase: AsyncFixPool(one, envs) for phase, one in limits.items()}
