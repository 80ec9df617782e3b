"""Environments that are awaited, and can be played by hand all the same."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from skyrl_gym.adapters.background_loop import BackgroundLoop
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType


class AwaitedEnv(BaseTextEnv):
    """An environment whose methods are coroutines, which the trainer awaits.

    `init`, `step` and `close` are for use by hand: they run their `…_async` twins in an event loop of the episode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._background: BackgroundLoop | None = None

    @abstractmethod
    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """See `BaseTextEnv.init`. Where it raises, it has released what it held."""

    @abstractmethod
    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """See `BaseTextEnv.step`."""

    @abstractmethod
    async def _release(self) -> None:
        """Let go of what the episode holds, in its own event loop. It may be asked to several times."""

    @abstractmethod
    def _abandon(self) -> None:
        """The same from outside, where the event loop is somebody else's, or gone."""

    async def close_async(self) -> None:
        """End the episode. Calling it again does nothing."""
        if self._background is None:
            await self._release()
        else:
            self.close()

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """See `init_async`."""
        self._background = self._background or BackgroundLoop(type(self).__name__)
        try:
            return self._background.run(self.init_async(prompt))
        except BaseException:
            self.close()
            raise

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """See `step_async`."""
        if self._background is None:
            raise RuntimeError("call init before step")
        return self._background.run(self.step_async(action))

    def close(self) -> None:
        """See `close_async`. What was awaited is ended from outside, and not waited for."""
        background, self._background = self._background, None
        if background is None:
            self._abandon()
            return
        try:
            background.run(self._release())
        finally:
            background.close()
