"""Environments behind one interface: every call bounded in time, in a thread, awaited, or in another process."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from omegaconf import OmegaConf

import skyrl_gym
from skyrl_train.config.environment import SkyRLGymConfig
from skyrl_train.errors import EnvError
from skyrl_train.generators.call_pool import CallOwner, CallPool, CallTimeout


class EnvTimeout(EnvError):
    """A call into an environment took longer than it may."""


class EnvCrashed(EnvError):
    """The process of an environment ended in the middle of an episode."""


class Episode(ABC):
    """One environment, from `init` to `close`."""

    @abstractmethod
    async def init(self, prompt: list[dict[str, Any]]) -> Any:
        """What the environment's `init` returns."""

    @abstractmethod
    async def step(self, action: str) -> Any:
        """What the environment's `step` returns."""

    @abstractmethod
    async def get_metrics(self) -> Any:
        """What the environment's `get_metrics` returns."""

    @abstractmethod
    async def close(self) -> None:
        """Close the environment, once. One that hangs in a call is closed when the call returns."""


class Episodes(Protocol):
    """Where environments live."""

    async def open(self, env_class: str, extras: dict[str, Any]) -> Episode:
        """Make an environment.

        Raises:
            EnvTimeout: it took too long.
        """
        ...

    async def close(self) -> None:
        """End what is left: threads, processes."""
        ...


class LocalEpisodes:
    """Environments in this process. Their blocking methods run in threads, `…_async` ones in the event loop."""

    def __init__(self, cfg: SkyRLGymConfig) -> None:
        """With `max_env_workers=0`, methods are called where they stand, and cannot be bounded in time."""
        self._cfg = cfg
        self._limit_s = cfg.call_timeout_seconds
        self._pool = CallPool(cfg.max_env_workers, self._limit_s, "skyrl-gym-env") if cfg.max_env_workers else None

    async def open(self, env_class: str, extras: dict[str, Any]) -> Episode:
        """See `Episodes.open`."""
        env_config = OmegaConf.create(self._cfg.env_config(env_class))
        episode = _LocalEpisode(self)
        await self.call(lambda: episode.make(env_class, env_config, extras), episode)
        return episode

    async def close(self) -> None:
        """See `Episodes.close`."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    async def call(self, function: Callable[[], Any], owner: CallOwner | None) -> Any:
        """A blocking call, in a thread where there are any."""
        if self._pool is None:
            return function()
        try:
            return await self._pool.run(function, owner)
        except CallTimeout as error:
            raise EnvTimeout(str(error)) from error

    async def wait_for(self, awaited: Any) -> Any:
        """What an `…_async` method returns."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await awaited
        except TimeoutError as error:
            raise EnvTimeout(f"took longer than {self._limit_s:g} s") from error


class _LocalEpisode(Episode):
    def __init__(self, episodes: LocalEpisodes) -> None:
        self._episodes = episodes
        self._env: Any = None
        self._is_lost = False  # a call into it never came back

    def make(self, env_class: str, env_config: Any, extras: dict[str, Any]) -> None:
        """Build the environment."""
        self._env = skyrl_gym.make(env_class, env_config=env_config, extras=extras)

    async def init(self, prompt: list[dict[str, Any]]) -> Any:
        return await self._call("init", prompt)

    async def step(self, action: str) -> Any:
        return await self._call("step", action)

    async def get_metrics(self) -> Any:
        return await self._call("get_metrics")

    async def close(self) -> None:
        if not self._is_lost and self._env is not None:
            await self._call("close")  # of one that hangs there, nothing else can be asked

    def lose(self) -> None:
        """See `CallOwner.lose`."""
        self._is_lost = True

    def clean_up(self) -> None:
        """See `CallOwner.clean_up`."""
        if self._env is not None:
            self._env.close()

    async def _call(self, method: str, *args: Any) -> Any:
        native = getattr(self._env, f"{method}_async", None)
        if inspect.iscoroutinefunction(native):
            return await self._episodes.wait_for(native(*args))
        bound = getattr(self._env, method)
        return await self._episodes.call(lambda: bound(*args), None if method == "close" else self)
