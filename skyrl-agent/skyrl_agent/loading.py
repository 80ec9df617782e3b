"""Paths of classes and functions in task files."""

from collections.abc import Callable
from typing import Any

from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.error import InvalidSpec

RENAMED = {
    "skyrl_agent.agents.oh_codeact.OHCodeActAgent": "skyrl_agent.agents.codeact.CodeActAgent",
    "skyrl_agent.tasks.general_react.utils.GeneralReactTask": "skyrl_agent.tasks.general_react.GeneralReactTask",
    "skyrl_agent.tasks.web_research_task.WebResearchTask": "skyrl_agent.tasks.web_research.WebResearchTask",
    "skyrl_agent.tasks.swebench.utils.SWEBenchTask": "skyrl_agent.tasks.swe_bench.SWEBenchTask",
}
"""Paths in SkyRL-Agent's task files, and our names for them."""


def load_class(path: str, base: type) -> Any:
    """Return the class at a dotted path such as `my_package.tasks.MyTask`.

    Raises:
        ValueError: the class does not exist, or is not a subclass of `base`.
    """
    module, _, name = RENAMED.get(path, path).rpartition(".")
    try:
        cls = load_attribute(f"{module}:{name}")
    except (ImportError, InvalidSpec) as error:
        raise ValueError(f"{path}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"{path} is {cls!r}; it must be a subclass of {base.__module__}.{base.__name__}")
    return cls


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at `module:function`. Raises ValueError if there is none."""
    try:
        function = load_attribute(path)
    except (ImportError, InvalidSpec) as error:
        raise ValueError(f"{path}: {error}") from error
    if not callable(function):
        raise ValueError(f"{path} is {function!r}; it must be a function")
    return function
