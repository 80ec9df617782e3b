"""Environments behind one interface: every call bounded in time, in a thread, awaited, or in another process."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from omegaconf import OmegaConf

import skyrl_gym
from skyrl_gym.methods import awaited_method
from skyrl_train.config.environment import SkyRLGymConfig
from skyrl_train.errors import EnvError
from skyrl_train.generators.call_pool import CallOwner, CallPool, CallTimeout


class EnvTimeout(EnvError):
    """A call into an environment took longer than it may."""


class EnvCrashed(EnvError):
    """The process of an environment ended in the middle of an episode."""


class Episode(ABC):
    """One environment, from `make` to `close`."""

    @abstractmethod
    async def make(self, env_class: str, extras: dict[str, Any]) -> None:
        """Build the environment. Whatever comes of it, `close` ends the episode.

        Raises:
            EnvTimeout: it took too long, as any other call may.
        """

    async def init(self, prompt: list[dict[str, Any]]) -> Any:
        """What the environment's `init` returns."""
        return await self._call("init", prompt)

    async def step(self, action: str) -> Any:
        """What the environment's `step` returns."""
        return await self._call("step", action)

    async def get_metrics(self) -> Any:
        """What the environment's `get_metrics` returns."""
        return await self._call("get_metrics")

    @abstractmethod
    async def close(self) -> None:
        """Close the environment, once. One that hangs in a call is closed when the call returns."""

    @abstractmethod
    async def _call(self, method: str, *args: Any) -> Any:
        """What a method of the environment returns; what it raises, as an `Exception`."""


class Episodes(Protocol):
    """Where environments live."""

    async def open(self) -> Episode:
        """A place for an environment; waits for one where there are only so many."""
        ...

    async def close(self) -> None:
        """End what is left: threads, processes."""
        ...


class LocalEpisodes:
    """Environments in this process. Their blocking methods run in threads, `…_async` ones in the event loop."""

    def __init__(self, cfg: SkyRLGymConfig) -> None:
        """With `max_env_workers=0`, methods are called where they stand, and cannot be bounded in time."""
        self.env_config = cfg.env_config
        self._limit_s = cfg.call_timeout_seconds
        self._pool = CallPool(cfg.max_env_workers, self._limit_s, "skyrl-gym-env") if cfg.max_env_workers else None

    async def open(self) -> Episode:
        """See `Episodes.open`: a call waits for a thread, an environment for nothing."""
        return _LocalEpisode(self)

    async def close(self) -> None:
        """See `Episodes.close`."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    async def call(self, function: Callable[[], Any], owner: CallOwner | None) -> Any:
        """A blocking call, in a thread where there are any."""
        if self._pool is None:
            with _own_error():
                return function()
        try:
            return await self._pool.run(function, owner)
        except CallTimeout as error:
            raise EnvTimeout(str(error)) from error

    async def wait_for(self, awaited: Awaitable[Any]) -> Any:
        """What an `…_async` method returns."""
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                with _own_error():
                    return await awaited
        except TimeoutError as error:
            if not limit.expired():  # it is the environment's own
                raise
            raise EnvTimeout(f"took longer than {self._limit_s:g} s") from error


class _LocalEpisode(Episode):
    def __init__(self, episodes: LocalEpisodes) -> None:
        self._episodes = episodes
        self._env: Any = None
        self._is_lost = False  # a call into it never came back

    async def make(self, env_class: str, extras: dict[str, Any]) -> None:
        env_config = OmegaConf.create(self._episodes.env_config(env_class))

        def make() -> None:
            self._env = skyrl_gym.make(env_class, env_config=env_config, extras=extras)

        await self._episodes.call(make, self)

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
        native = awaited_method(self._env, method)
        if native is not None:
            return await self._episodes.wait_for(native(*args))
        bound = getattr(self._env, method)
        return await self._episodes.call(lambda: bound(*args), None if method == "close" else self)


@contextmanager
def _own_error() -> Iterator[None]:
    """An environment that raises what would end the task, or the event loop, fails as any other."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # from outside
        raise EnvError(f"{type(error).__name__}: {error}") from error
