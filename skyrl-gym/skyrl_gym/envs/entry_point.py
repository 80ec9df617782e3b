"""Entry points such as ``"examples.catch.env:CatchEnv"``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from skyrl_gym import error


def load_attribute(name: str) -> Any:
    """Import the object at ``"module:attribute"``.

    Raises:
        InvalidSpec: the name has another form, or the module has no such attribute.
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
            f"the entry point {name!r} is not an attribute of {module_name} ({module.__file__}).{hint}"
        ) from problem


def split_entry_point(name: str) -> tuple[str, str]:
    """Split an entry point into module and attribute. Raises `InvalidSpec` if one is missing."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise error.InvalidSpec(
            f"the entry point {name!r} must be 'module:attribute', such as 'examples.catch.env:CatchEnv'"
        )
    return module_name, attribute


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return a sentence that suggests the closest known name, or an empty string if none is close."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
