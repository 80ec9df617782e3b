"""Asynchronous environments that also have blocking methods, for use by hand."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from skyrl_gym.adapters.background_loop import BackgroundLoop
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType


class AsyncEnv(BaseTextEnv):
    """An environment whose methods are coroutine functions, which the trainer awaits.

    `init`, `step` and `close` are for use by hand: they run the `…_async` methods in an event loop of the episode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._background: BackgroundLoop | None = None

    @abstractmethod
    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Start the episode, as `BaseTextEnv.init`. Release all resources if it raises."""

    @abstractmethod
    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Process the model's reply, as `BaseTextEnv.step`."""

    @abstractmethod
    async def _release(self) -> None:
        """Release the episode's resources, in its own event loop. May be called several times."""

    @abstractmethod
    def _abandon(self) -> None:
        """Release the episode's resources from another thread or event loop, or after the loop has ended."""

    async def close_async(self) -> None:
        """End the episode. Calling it again does nothing."""
        if self._background is None:
            await self._release()
        else:
            self.close()

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Run `init_async`."""
        self._background = self._background or BackgroundLoop(type(self).__name__)
        try:
            return self._background.run(self.init_async(prompt))
        except BaseException:
            self.close()
            raise

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run `step_async`."""
        if self._background is None:
            raise RuntimeError("call init before step")
        return self._background.run(self.step_async(action))

    def close(self) -> None:
        """End the episode. An episode in another event loop is abandoned, not awaited."""
        background, self._background = self._background, None
        if background is None:
            self._abandon()
            return
        try:
            background.run(self._release())
        finally:
            background.close()
