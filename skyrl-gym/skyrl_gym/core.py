"""The interface that every environment implements, and the specification that an environment is made from."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypedDict, TypeVar

from skyrl_gym import error
from skyrl_gym.envs.entry_point import load_attribute, split_entry_point

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


EnvCreator = Callable[..., Env[Any, Any]]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """A registered environment, e.g. ``EnvSpec("catch", "examples.catch.env:CatchEnv", {"env_config": {}})``.

    - id: the `env_class` of its dataset rows.
    - entry_point: the class, a function that returns an environment, or its import path ``"module:attribute"``.
    - kwargs: default constructor arguments. The arguments of `make` override them.
    """

    id: str
    entry_point: EnvCreator | str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise error.InvalidSpec(f"the environment id {self.id!r} must be a non-empty string, such as 'catch'")
        if isinstance(self.entry_point, str):
            split_entry_point(self.entry_point)
        elif self.entry_point is not None and not callable(self.entry_point):
            raise error.InvalidSpec(
                f"entry_point of {self.id!r} is {self.entry_point!r}; use a class, a function or 'module:attribute'"
            )
        if not isinstance(self.kwargs, dict):
            raise error.InvalidSpec(f"the kwargs of {self.id!r} must be a dict, got {self.kwargs!r}")

    @property
    def name(self) -> str:
        """The environment's id."""
        return self.id

    def load(self) -> EnvCreator:
        """Return the class or function of `entry_point`, imported if necessary."""
        if self.entry_point is None:
            raise error.InvalidSpec(f"the spec of {self.id!r} has no entry_point; use a class or 'module:attribute'")
        if not isinstance(self.entry_point, str):
            return self.entry_point
        creator: EnvCreator = load_attribute(self.entry_point)
        return creator

    def make(self, **kwargs: Any) -> Env[Any, Any]:
        """Make a new environment from this spec. Same as `skyrl_gym.make(spec, **kwargs)`."""
        merged = copy.deepcopy(self.kwargs) | kwargs
        creator = self.load()
        try:
            env = creator(**merged)
        except TypeError as problem:
            raise TypeError(
                f"{problem} (raised while making environment {self.id!r} with kwargs {merged})"
            ) from problem
        if not isinstance(env, Env):
            raise TypeError(
                f"the entry_point of {self.id!r} must return a skyrl_gym.Env, got {type(env).__name__}; "
                "subclass skyrl_gym.envs.base_text_env.BaseTextEnv"
            )
        env.spec = dataclasses.replace(self, kwargs=merged)
        return env

    def to_json(self) -> str:
        """Write this spec as JSON. Raises `InvalidSpec` if the entry point or an argument cannot be written."""
        if callable(self.entry_point):
            raise error.InvalidSpec(
                f"the entry_point of {self.id!r} is the object {self.entry_point!r}, which cannot be written as JSON; "
                "use 'module:attribute'"
            )
        try:
            return json.dumps(dataclasses.asdict(self))
        except (TypeError, ValueError) as problem:
            raise error.InvalidSpec(
                f"the kwargs of {self.id!r} cannot be written as JSON: {problem}; got {self.kwargs!r}"
            ) from problem

    @staticmethod
    def from_json(json_env_spec: str) -> EnvSpec:
        """Read a spec that `to_json` wrote. Raises `InvalidSpec` for anything else."""
        try:
            fields = json.loads(json_env_spec)
        except json.JSONDecodeError as problem:
            raise error.InvalidSpec(f"not the JSON of an EnvSpec: {problem}; got {json_env_spec!r}") from problem
        if not isinstance(fields, dict):
            raise error.InvalidSpec(f"the JSON of an EnvSpec is an object with id, entry_point, kwargs; got {fields!r}")
        try:
            return EnvSpec(**fields)
        except TypeError as problem:
            raise error.InvalidSpec(
                f"the JSON of an EnvSpec has the keys id, entry_point and kwargs; got {sorted(fields)}"
            ) from problem

    def pprint(self, disable_print: bool = False, include_entry_points: bool = False) -> str | None:
        """Print this spec, one field per line. With `disable_print`, return the text instead."""
        lines = [f"id={self.id}"]
        if include_entry_points:
            lines.append(f"entry_point={self.entry_point}")
        lines.extend(f"{key}={value!r}" for key, value in self.kwargs.items())
        if disable_print:
            return "\n".join(lines)
        print(*lines, sep="\n")  # noqa: T201, as the name says
        return None
