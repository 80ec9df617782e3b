"""The registry: maps the `env_class` of a dataset row to an environment.

It is a plain dict in this process. Worker processes start with only what their imports register, so register
environments in code that the workers import, not only in the launch script.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym import error
from skyrl_gym.core import Env, EnvCreator, EnvSpec
from skyrl_gym.envs.entry_point import load_attribute, suggest_name

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
    return (id if isinstance(id, EnvSpec) else spec(id)).make(**kwargs)


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
    if disable_print:
        return "\n".join(lines)
    print(*lines, sep="\n")  # noqa: T201, as the name says
    return None


def _is_built_in(env_spec: EnvSpec) -> bool:
    return isinstance(env_spec.entry_point, str) and env_spec.entry_point.startswith(__name__.split(".")[0] + ".")
