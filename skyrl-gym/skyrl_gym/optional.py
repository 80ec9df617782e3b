"""Packages that only some environments and tools need: the extras of skyrl-gym."""

from __future__ import annotations

import importlib.util


def how_to_install(extra: str) -> str:
    """The command that installs an extra, for messages."""
    return f"pip install './skyrl-gym[{extra}]' (in your clone of the repository)"


def require(package: str, extra: str, who: str) -> None:
    """Raises ModuleNotFoundError, with the command that helps, where `who` needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{who} need the package {package}: {how_to_install(extra)}")
