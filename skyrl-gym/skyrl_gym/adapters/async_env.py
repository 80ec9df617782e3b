"""Base class for asynchronous environments, with blocking methods for interactive use."""

from abc import abstractmethod
from typing import Any

from skyrl_gym.adapters.background_loop import BackgroundLoop
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType


class AsyncEnv(BaseTextEnv):
    """An environment whose methods are coroutine functions. The trainer awaits them.

    `init`, `step` and `close` are for interactive use: they run the `…_async` methods in the episode's event loop.
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
        """Release the episode's resources in its own event loop. May be called several times."""

    @abstractmethod
    def _abandon(self) -> None:
        """Release the episode's resources from a different thread or event loop, or after the loop has ended."""

    async def close_async(self) -> None:
        """End the episode. Idempotent."""
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
        """End the episode. If it belongs to a different event loop, abandon it instead of awaiting it."""
        background, self._background = self._background, None
        if background is None:
            self._abandon()
            return
        try:
            background.run(self._release())
        finally:
            background.close()
