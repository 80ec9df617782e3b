"""The interface that every environment implements."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypedDict, TypeVar

if TYPE_CHECKING:
    from skyrl_gym.envs.registration import EnvSpec

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict, Generic[ObsType]):
    """The return value of `Env.step`; a plain dict at run time.

    observations: the policy's next input, e.g. ``[{"role": "user", "content": "Try again."}]``.
    reward: this step's reward, not the running total. None means unknown: the episode ends, and no
        baseline and no metric counts it.
    done: True if the episode ended with this step.
    metadata: values for logs and analysis. Training reads two keys: `reward_components`, the named parts of this
        step's reward, e.g. ``{"correct": 1.0, "format": 0.2}``; and `modified_chat_history`, a list of messages that
        replaces the conversation so far.
    """

    observations: ObsType
    reward: float | None
    done: bool
    metadata: dict[str, Any]


class Env(Generic[ObsType, ActType]):
    """One episode of one task: `init` once, `step` until done, `close`. Create a new instance for each episode.

    As a context manager, it closes itself at the end of the block, even after an error.
    """

    validates_rows: ClassVar[bool] = False
    """True if the constructor only reads the row and the configuration. The trainer then constructs one environment per
    row before it loads a model, and reports every row that the constructor rejects. A subclass with its own constructor
    must set this again."""

    spec: EnvSpec | None = None
    """The spec that `make` built this environment from. None if the class was called directly."""

    @classmethod
    def check_packages(cls) -> None:
        """Raise ImportError, with the install command, if a package is missing that only an episode imports.

        Called once before training, in the interpreter that runs the environment.
        """

    def init(self, *args: Any, **kwargs: Any) -> tuple[ObsType, dict[str, Any]]:
        """Start the episode. Return the first observations and a dict of metadata."""
        raise NotImplementedError(f"{type(self).__name__} must implement init()")

    def step(self, action: ActType) -> EnvStepOutput[ObsType]:
        """Process one action of the policy."""
        raise NotImplementedError(f"{type(self).__name__} must implement step()")

    def grade_unfinished(self) -> float | None:
        """Return the final reward of an episode that the trainer ends before `step` is done. The default is 0.

        Called at most once, after the last step, when the conversation reaches its maximum of turns or tokens. The
        reward adds to the rewards of the steps. None makes the rollout invalid.
        """
        return 0.0

    def close(self) -> None:
        """Release the episode's resources (processes, connections, files). Idempotent."""

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
