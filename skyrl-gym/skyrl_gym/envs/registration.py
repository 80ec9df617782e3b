"""The registry: from an environment's name in a dataset row to a new environment.

It is a plain dict of this process. A worker process starts with what its imports register, so register your own
environment in the code that the worker runs, not only in the script that launched it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym import error
from skyrl_gym.core import Env
from skyrl_gym.entry_point import load_attribute, split_entry_point, suggestion

EnvCreator = Callable[..., Env[Any, Any]]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """How to make one environment, e.g. ``EnvSpec("catch", "examples.catch.env:CatchEnv", {"env_config": {}})``.

    id: the name that dataset rows carry in `env_class`.
    entry_point: the class, a function that returns an environment, or where to import either: ``"module:attribute"``.
    kwargs: default constructor arguments; those given to `make` win over them.
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
                f"entry_point of {self.id!r} is {self.entry_point!r}; give a class, a function or 'module:attribute'"
            )
        if not isinstance(self.kwargs, dict):
            raise error.InvalidSpec(f"the kwargs of {self.id!r} must be a dict, got {self.kwargs!r}")

    @property
    def name(self) -> str:
        """The id, under the name that printed registries use."""
        return self.id

    def load(self) -> EnvCreator:
        """The class or function behind `entry_point`, imported if need be."""
        if self.entry_point is None:
            raise error.InvalidSpec(f"the spec of {self.id!r} has no entry_point; give a class or 'module:attribute'")
        return load_env_creator(self.entry_point) if isinstance(self.entry_point, str) else self.entry_point

    def make(self, **kwargs: Any) -> Env[Any, Any]:
        """A new environment; see `make`."""
        return make(self, **kwargs)

    def to_json(self) -> str:
        """This spec as JSON, for `from_json`. Raises `InvalidSpec` when the entry point or an argument has no JSON."""
        if callable(self.entry_point):
            raise error.InvalidSpec(
                f"the entry_point of {self.id!r} is the object {self.entry_point!r}; only 'module:attribute' has JSON"
            )
        try:
            return json.dumps(dataclasses.asdict(self))
        except (TypeError, ValueError) as problem:
            raise error.InvalidSpec(
                f"the kwargs of {self.id!r} have no JSON: {problem}; got {self.kwargs!r}"
            ) from problem

    @staticmethod
    def from_json(json_env_spec: str) -> EnvSpec:
        """The spec that `to_json` wrote. Raises `InvalidSpec` for anything else."""
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
        """Print this spec, one field a line; with `disable_print`, return the text."""
        lines = [f"id={self.id}"]
        if include_entry_points:
            lines.append(f"entry_point={self.entry_point}")
        lines.extend(f"{key}={value!r}" for key, value in self.kwargs.items())
        return _print_or_return("\n".join(lines), disable_print)


registry: dict[str, EnvSpec] = {}
"""Every registered environment of this process, by id."""


def register(id: str, entry_point: EnvCreator | str | None = None, kwargs: Mapping[str, Any] | None = None) -> None:
    """Let `make` build the environment `entry_point` under the name `id`.

        register(id="multiply", entry_point="my_project.multiply:MultiplyEnv")

    An environment of yours takes the place of one of ours that has the same name.

    Raises:
        RegistrationError: `id` is taken by another of yours, or `entry_point` is missing or malformed.
    """
    if entry_point is None:
        raise error.RegistrationError(f"registering {id!r} needs an entry_point: a class or 'module:attribute'")
    if id in registry and not _is_built_in(registry[id]):
        raise error.RegistrationError(
            f"cannot register {id!r} as {entry_point}: it is already registered as {registry[id].entry_point}; "
            f"choose another id, or call deregister({id!r}) first"
        )
    registry[id] = EnvSpec(id=id, entry_point=entry_point, kwargs=dict(kwargs or {}))


def deregister(id: str) -> None:
    """Forget the environment `id`. Raises `UnregisteredEnv` when there is none."""
    spec(id)
    del registry[id]


def spec(env_id: str) -> EnvSpec:
    """How the environment `env_id` is made. Raises `UnregisteredEnv` when it is not registered in this process."""
    try:
        return registry[env_id]
    except KeyError:
        raise error.UnregisteredEnv(_unregistered_message(env_id)) from None


def make(id: str | EnvSpec, **kwargs: Any) -> Env[Any, Any]:
    """Make a new environment, with the registered arguments and, over them, `kwargs`.

    The registered arguments are deep-copied: no two environments share them. `kwargs` are passed on as they are. What
    was used is kept in the environment's `spec`.

    Raises:
        UnregisteredEnv: no environment has this id.
        TypeError: the constructor refuses its arguments, or the entry point returns something else than an `Env`.
    """
    env_spec = id if isinstance(id, EnvSpec) else spec(id)
    merged = copy.deepcopy(env_spec.kwargs) | kwargs
    creator = env_spec.load()
    try:
        env = creator(**merged)
    except TypeError as problem:
        raise TypeError(
            f"{problem} (raised while making environment {env_spec.id!r} with kwargs {merged})"
        ) from problem
    if not isinstance(env, Env):
        raise TypeError(
            f"the entry_point of {env_spec.id!r} must return a skyrl_gym.Env, got {type(env).__name__}; "
            "subclass skyrl_gym.envs.base_text_env.BaseTextEnv"
        )
    env.spec = dataclasses.replace(env_spec, kwargs=merged)
    return env


def load_env_creator(name: str) -> EnvCreator:
    """Import the class or function at ``"module:attribute"``."""
    creator: EnvCreator = load_attribute(name)
    return creator


def pprint_registry(
    print_registry: Mapping[str, EnvSpec] = registry, num_cols: int = 3, disable_print: bool = False
) -> str | None:
    """Print the registered ids, sorted, in `num_cols` aligned columns; with `disable_print`, return the text."""
    ids = sorted(print_registry)
    width = max(map(len, ids), default=0)
    rows = [ids[start : start + num_cols] for start in range(0, len(ids), num_cols)]
    lines = ["  ".join(env_id.ljust(width) for env_id in row).rstrip() for row in rows]
    return _print_or_return("\n".join(lines), disable_print)


def _is_built_in(env_spec: EnvSpec) -> bool:
    return isinstance(env_spec.entry_point, str) and env_spec.entry_point.startswith(__name__.split(".")[0] + ".")


def _unregistered_message(env_id: str) -> str:
    known = ", ".join(sorted(registry)) or "none"
    return (
        f"No registered env with id: {env_id!r}.{suggestion(str(env_id), list(registry))} Registered here: {known}. "
        "The registry belongs to one process: import or register the environment in the process that makes it."
    )


def _print_or_return(text: str, disable_print: bool) -> str | None:
    if disable_print:
        return text
    sys.stdout.write(text + "\n")
    return None
