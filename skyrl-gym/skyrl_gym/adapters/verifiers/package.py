"""Loading of verifiers' environment packages by id.

There are two generations. A v0 package has a function `load_environment(**args)`, and needs classes that verifiers 0.3
removed. A v1 package has a `Taskset` among the names in its `__all__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from skyrl_gym.adapters.verifiers.turn import VerifiersEpisode
from skyrl_gym.optional import require

BUILT_IN = "verifiers.v1.tasksets"
NO_V0 = (
    "{env_id} is an environment of verifiers' first generation (load_environment), but verifiers {version} supports "
    "only the second. Create a virtual environment with skyrl-gym, 'verifiers<0.3' and the package, and set "
    "environment.skyrl_gym.python to its python"
)

_lock = threading.RLock()
_loaded: dict[str, Package] = {}


class Package(Protocol):
    """An environment with its arguments, shared by all rollouts of a process."""

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the dataset: the `prompt`, `example_id` and `answer` of each row, the `input` for `episode`, and the
        `route` to the member of an environment group.
        """

    @property
    def is_infinite(self) -> bool:
        """True if `rows` never ends."""

    def episode(self, row_input: Mapping[str, Any], max_turns: int) -> VerifiersEpisode:
        """Create a rollout of the row with this `input`."""


def load_package(env_id: str, args: Mapping[str, Any], env: Mapping[str, Any], *, is_chat: bool = True) -> Package:
    """Load the environment `env_id`, once for the same arguments. This blocks on disk access only.

    With `is_chat=False`, a taskset may need a program or a container, and has no `episode`.

    Raises:
        ImportError: verifiers or the package is not installed, or their generations differ.
        ValueError: the package contains no environment, or the environment rejects its arguments.
    """
    require("verifiers", "verifiers", "environments of verifiers")
    key = json.dumps([env_id, args, env, is_chat], sort_keys=True, default=repr)
    with _lock:  # imports and datasets are slow, and many rollouts come at once
        if key not in _loaded:
            _loaded[key] = _load(env_id, args, env, is_chat)
        return _loaded[key]


def _load(env_id: str, args: Mapping[str, Any], env: Mapping[str, Any], is_chat: bool) -> Any:
    name = module_name(env_id)
    verifiers = importlib.import_module("verifiers")
    no_v0 = partial(NO_V0.format, env_id=env_id, version=getattr(verifiers, "__version__", ""))
    try:
        module = _import(name)
    except (AttributeError, ImportError) as problem:
        if _needs_v0(problem, verifiers):
            raise ImportError(no_v0()) from problem
        raise
    if hasattr(module, "load_environment"):
        if not hasattr(verifiers, "Environment"):
            raise ImportError(no_v0())
        from skyrl_gym.adapters.verifiers.v0 import EnvironmentPackage

        if env:
            raise ValueError(f"environment.skyrl_gym.verifiers.env={env!r} is for v1, but {env_id} is v0; use args")
        return EnvironmentPackage(name, args)
    if not any(map(_is_taskset, (getattr(module, exported, None) for exported in getattr(module, "__all__", ())))):
        raise ValueError(
            f"{name} ({module.__file__}) contains no environment of verifiers: neither a function load_environment, "
            "nor a Taskset among the names in __all__"
        )
    try:
        from skyrl_gym.adapters.verifiers.v1 import Tasks, TasksetPackage
    except ImportError as problem:
        raise ImportError(f"{name} is a taskset, which needs verifiers>=0.4") from problem
    return (TasksetPackage if is_chat else Tasks)(name, args, env)


def module_name(env_id: str) -> str:
    """Return the module of an environment: `my_env` for ``my-env``, and for the Hub's ``owner/my-env@0.1.0``."""
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")


def _import(name: str) -> ModuleType:
    if importlib.util.find_spec("verifiers.v1") and importlib.util.find_spec(BUILT_IN):
        built_in = f"{BUILT_IN}.{name}"
        name = built_in if importlib.util.find_spec(built_in) else name
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name != name:
            raise
        raise ImportError(f"the module {name} is not installed; install the environment's package") from problem


def _needs_v0(problem: AttributeError | ImportError, verifiers: ModuleType) -> bool:
    """Return True if a package failed to import a name that only verifiers' first generation has."""
    if hasattr(verifiers, "Environment"):
        return False
    if isinstance(problem, AttributeError):
        return problem.obj is verifiers
    return (problem.name or "").partition(".")[0] == "verifiers"


def _is_taskset(exported: Any) -> bool:
    bases = exported.__mro__ if isinstance(exported, type) else ()
    return any(base.__name__ == "Taskset" and base.__module__.startswith("verifiers.") for base in bases)
