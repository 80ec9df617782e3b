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
    reward: the reward of this step alone, not the running total. None if it is unknown, which ends the episode; no
        baseline and no metric counts it.
    done: True if the episode ended with this step.
    metadata: facts for logs and analysis. Training reads two of them: `reward_components`, the named parts of the
        reward of this step, e.g. ``{"correct": 1.0, "format": 0.2}``; and `modified_chat_history`, messages that
        replace the conversation so far.
    """

    observations: ObsType
    reward: float | None
    done: bool
    metadata: dict[str, Any]


class Env(Generic[ObsType, ActType]):
    """One episode of one task: `init` once, `step` until done, `close`. Create a new instance for each episode.

    As a context manager, an environment closes itself at the end of the block, also after an error.
    """

    validates_rows: ClassVar[bool] = False
    """True if the constructor does nothing but read the row and the configuration. The trainer then constructs one
    environment from every row before it loads a model, and reports the rows that the constructor refuses. A subclass
    with a constructor of its own sets it again."""

    spec: EnvSpec | None = None
    """The spec from which `make` built this environment; None if the class was called directly."""

    @classmethod
    def check_packages(cls) -> None:
        """Raise ImportError, with the install command, if a package that only an episode imports is missing.

        It is called once before training, in the interpreter that plays the environment.
        """

    def init(self, *args: Any, **kwargs: Any) -> tuple[ObsType, dict[str, Any]]:
        """Start the episode; return the first observations and a dict of facts."""
        raise NotImplementedError(f"{type(self).__name__} must implement init()")

    def step(self, action: ActType) -> EnvStepOutput[ObsType]:
        """Process one action of the policy."""
        raise NotImplementedError(f"{type(self).__name__} must implement step()")

    def grade_unfinished(self) -> float | None:
        """Return the reward of an episode that the trainer ends before `step` is done, beside the rewards of its steps.

        It is called at most once, after the last step, if the conversation reached the maximum of turns or tokens. None
        makes the rollout invalid. By default, there is no such reward.
        """
        return 0.0

    def close(self) -> None:
        """Release the resources of the episode (processes, connections, files). Calling it again does nothing."""

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
