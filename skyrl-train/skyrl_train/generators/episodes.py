"""The interface of environments in rollouts: an `Episodes` opens an `Episode` for each of them.

`env_pool` runs environments in threads of this process, `env_processes` in worker processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from skyrl_train.errors import EnvError


class EnvTimeout(EnvError):
    """A call into an environment exceeded `environment.skyrl_gym.call_timeout_seconds`."""


class EnvCrashed(EnvError):
    """The process of an environment ended in the middle of an episode."""


class Episode(ABC):
    """One environment, from `make` to `close`. Each call may raise EnvTimeout."""

    @abstractmethod
    async def make(self, env_class: str, extras: dict[str, Any]) -> None:
        """Build the environment. Call `close` even if this fails."""

    async def init(self, prompt: list[dict[str, Any]]) -> Any:
        """Return the result of the environment's `init`."""
        return await self._call("init", prompt)

    async def step(self, action: str) -> Any:
        """Return the result of the environment's `step`."""
        return await self._call("step", action)

    async def get_metrics(self) -> Any:
        """Return the result of the environment's `get_metrics`."""
        return await self._call("get_metrics")

    @abstractmethod
    async def close(self) -> None:
        """Close the environment once, or leave that to the call that it hangs in."""

    @abstractmethod
    async def _call(self, method: str, *args: Any) -> Any:
        """Return the result of a method of the environment, or raise its error as an `Exception`."""


class Episodes(Protocol):
    """A pool of slots for environments."""

    async def open(self) -> Episode:
        """Return an episode, after waiting for a free slot."""
        ...

    async def close(self) -> None:
        """End the threads or processes of the pool."""
        ...
