"""Tools that environments offer to models."""

from importlib import import_module

from skyrl_gym.tools.core import Prefixed, ToolGroup, tool

__all__ = [
    "Prefixed",
    "PythonCodeExecutorToolGroup",
    "SQLCodeExecutorToolGroup",
    "SearchToolGroup",
    "ToolGroup",
    "tool",
]

_MODULES = {
    "PythonCodeExecutorToolGroup": "skyrl_gym.tools.python",
    "SQLCodeExecutorToolGroup": "skyrl_gym.tools.sql",
    "SearchToolGroup": "skyrl_gym.tools.search",
}


def __getattr__(name: str) -> object:
    """Import a tool group with extra dependencies on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
