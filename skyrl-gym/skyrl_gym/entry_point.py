"""What a name such as ``"examples.catch.env:CatchEnv"`` stands for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from skyrl_gym import error


def load_attribute(name: str) -> Any:
    """Import what is at ``"module:attribute"``.

    Raises:
        InvalidSpec: it is no such name, or the module has no such attribute.
        ImportError: the module cannot be imported.
    """
    module_name, attribute = split_entry_point(name)
    try:
        module = importlib.import_module(module_name)
    except ImportError as problem:
        problem.add_note(f"while importing the entry point {name!r}")
        raise
    try:
        return getattr(module, attribute)
    except AttributeError as problem:
        hint = suggestion(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise error.InvalidSpec(
            f"the entry point {name!r} names no attribute of {module_name} ({module.__file__}).{hint}"
        ) from problem


def split_entry_point(name: str) -> tuple[str, str]:
    """The module and the attribute; `InvalidSpec` if the name has not both."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise error.InvalidSpec(
            f"the entry point {name!r} must be 'module:attribute', such as 'examples.catch.env:CatchEnv'"
        )
    return module_name, attribute


def suggestion(name: str, known: Sequence[str]) -> str:
    """A sentence with the nearest of the known names; empty if none is near."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
