"""The interface that every environment implements."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar

if TYPE_CHECKING:
    from skyrl_gym.envs.registration import EnvSpec

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict, Generic[ObsType]):
    """What one `Env.step` returns; a plain dict at run time.

    observations: what the policy reads next, e.g. ``[{"role": "user", "content": "Try again."}]``.
    reward: the reward of this step alone, not the running total; None where it cannot be told, which ends the episode
        as one that no baseline and no metric counts.
    done: whether the episode ended with this step.
    metadata: facts for logs and analysis. Training reads two of them: `reward_components`, the named parts of the
        reward of this step, e.g. ``{"correct": 1.0, "format": 0.2}``; and `modified_chat_history`, messages that take
        the place of the conversation so far.
    """

    observations: ObsType
    reward: float | None
    done: bool
    metadata: dict[str, Any]


class Env(Generic[ObsType, ActType]):
    """One episode of one task: `init` once, `step` until done, `close`. An episode is never reset; make a new one.

    Used as a context manager, an environment closes itself however the block ends.
    """

    spec: EnvSpec | None = None
    """How `make` built this environment; None when the class was called directly."""

    def init(self, *args: Any, **kwargs: Any) -> tuple[ObsType, dict[str, Any]]:
        """Begin the episode: the first observations, and facts about the start."""
        raise NotImplementedError(f"{type(self).__name__} must implement init()")

    def step(self, action: ActType) -> EnvStepOutput[ObsType]:
        """Answer one action of the policy."""
        raise NotImplementedError(f"{type(self).__name__} must implement step()")

    def close(self) -> None:
        """Release what the episode holds (processes, connections, files). Calling it again does nothing."""

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
