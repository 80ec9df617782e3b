"""The registry: maps the `env_class` of a dataset row to an environment.

It is a plain dict in this process. Worker processes start with only what their imports register, so register
environments in code that the workers import, not only in the launch script.
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
from skyrl_gym.envs.entry_point import load_attribute, split_entry_point, suggest_name

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
        return load_env_creator(self.entry_point) if isinstance(self.entry_point, str) else self.entry_point

    def make(self, **kwargs: Any) -> Env[Any, Any]:
        """Make a new environment from this spec. Same as `make(spec, **kwargs)`."""
        return make(self, **kwargs)

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
        return _print_or_return("\n".join(lines), disable_print)


registry: dict[str, EnvSpec] = {}
"""Registered environments of this process, by id."""


def register(id: str, entry_point: EnvCreator | str | None = None, kwargs: Mapping[str, Any] | None = None) -> None:
    """Register an environment, so that `make(id)` builds it.

    >>> register(id="table", entry_point="skyrl_gym.envs.multiply.env:MultiplyEnv")
    >>> spec("table").entry_point
    'skyrl_gym.envs.multiply.env:MultiplyEnv'
    >>> deregister("table")

    A built-in environment with the same id is replaced.

    Raises:
        RegistrationError: `id` is already registered and not built in, or `entry_point` is missing or malformed.
    """
    if entry_point is None:
        raise error.RegistrationError(f"registering {id!r} needs an entry_point; use a class or 'module:attribute'")
    if id in registry and not _is_built_in(registry[id]):
        raise error.RegistrationError(
            f"cannot register {id!r} as {entry_point}: it is already registered as {registry[id].entry_point}; "
            f"choose another id, or call deregister({id!r}) first"
        )
    registry[id] = EnvSpec(id=id, entry_point=entry_point, kwargs=dict(kwargs or {}))


def deregister(id: str) -> None:
    """Remove the environment `id` from the registry. Raises `UnregisteredEnv` if it is not registered."""
    spec(id)
    del registry[id]


def spec(env_id: str) -> EnvSpec:
    """Return the spec of `env_id`. Raises `UnregisteredEnv` if it is not registered in this process."""
    if env_id in registry:
        return registry[env_id]
    if isinstance(env_id, str) and ":" in env_id:
        return EnvSpec(env_id, env_id)  # "my_module:MyEnv" needs no registration
    known = ", ".join(sorted(registry)) or "none"
    message = (
        f"No registered env with id: {env_id!r}.{suggest_name(str(env_id), list(registry))} Registered here: {known}. "
        "The registry belongs to one process: import or register the environment in the process that makes it."
    )
    raise error.UnregisteredEnv(message)


def make(id: str | EnvSpec, **kwargs: Any) -> Env[Any, Any]:
    r"""Make a new environment with the registered arguments. `kwargs` override them.

    Registered arguments are deep-copied, so environments do not share them, but `kwargs` are not. The environment's
    `spec` holds the merged arguments.

    Raises:
        UnregisteredEnv: no environment has this id.
        TypeError: the constructor rejects its arguments, or the entry point does not return an `Env`.

    >>> register(id="table", entry_point="skyrl_gym.envs.multiply.env:MultiplyEnv", kwargs={"env_config": {}})
    >>> env = make("table", extras={"reward_spec": {"ground_truth": "42"}})
    >>> env.step(r"6 times 7 is \boxed{42}.")["reward"]
    1.0
    >>> deregister("table")
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


def validates_rows(creator: EnvCreator) -> bool:
    """Return True if a class sets `validates_rows` and no subclass has replaced its constructor since."""
    for cls in getattr(creator, "__mro__", ()):
        if "validates_rows" in vars(cls):
            return bool(vars(cls)["validates_rows"])
        if "__init__" in vars(cls):
            return False
    return False


def load_env_creator(name: str) -> EnvCreator:
    """Import the class or function at ``"module:attribute"``."""
    creator: EnvCreator = load_attribute(name)
    return creator


def pprint_registry(
    print_registry: Mapping[str, EnvSpec] = registry, num_cols: int = 3, disable_print: bool = False
) -> str | None:
    """Print the registered ids, sorted, in `num_cols` columns. With `disable_print`, return the text instead."""
    ids = sorted(print_registry)
    width = max(map(len, ids), default=0)
    rows = [ids[start : start + num_cols] for start in range(0, len(ids), num_cols)]
    lines = ["  ".join(env_id.ljust(width) for env_id in row).rstrip() for row in rows]
    return _print_or_return("\n".join(lines), disable_print)


def _is_built_in(env_spec: EnvSpec) -> bool:
    return isinstance(env_spec.entry_point, str) and env_spec.entry_point.startswith(__name__.split(".")[0] + ".")


def _print_or_return(text: str, disable_print: bool) -> str | None:
    if disable_print:
        return text
    sys.stdout.write(text + "\n")
    return None
