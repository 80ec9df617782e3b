"""Entry points such as ``"examples.catch.env:CatchEnv"``."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

from skyrl_gym import error


def load_attribute(name: str) -> Any:
    """Import the object at ``"module:attribute"``.

    Raises:
        InvalidSpec: the entry point is malformed, or the module has no such attribute.
        ImportError: the module cannot be imported.
    """
    module_name, attribute = split_entry_point(name)
    try:
        module = importlib.import_module(module_name)
    except ImportError as problem:
        problem.add_note(f"while importing the entry point {name!r}")
        raise
    return _attribute(module, attribute, f"entry point {name!r}: module {module_name} ({module.__file__})")


def load_from_file(path: str, attribute: str) -> Any:
    """Load an attribute of a Python file. Its name need not be a valid module name. A file runs once per process.

    Raises:
        InvalidSpec: the file does not exist, or has no such attribute.
        Exception: whatever the file raises.
    """
    file = Path(os.path.expandvars(path)).expanduser().resolve()
    if not file.is_file():
        raise error.InvalidSpec(f"{path!r} is not a file (looked for {file})")
    digest = hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()
    name = f"{file.stem.replace('-', '_')}_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(file)))
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: dataclasses and pickle look it up
        try:
            SourceFileLoader(name, str(file)).exec_module(module)
        except BaseException as problem:
            del sys.modules[name]
            problem.add_note(f"while loading {file}")
            raise
    return _attribute(sys.modules[name], attribute, f"the file {path!r}")


def _attribute(module: ModuleType, attribute: str, source: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError as problem:
        names = [name for name in vars(module) if not name.startswith("_")]
        hint = suggest_name(attribute, names) or f" It has {shorten(', '.join(names) or 'nothing', 200)}."
        raise error.InvalidSpec(f"{source} has no attribute {attribute!r}.{hint}") from problem


def split_entry_point(name: str) -> tuple[str, str]:
    """Split an entry point into module and attribute. Raises `InvalidSpec` if one is missing.

    >>> split_entry_point("examples.catch.env:CatchEnv")
    ('examples.catch.env', 'CatchEnv')
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise error.InvalidSpec(
            f"the entry point {name!r} must be 'module:attribute', such as 'examples.catch.env:CatchEnv'"
        )
    return module_name, attribute


def select_arguments(method: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments that a method's signature names, or all if it has `**kwargs`."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Return a sentence that suggests the closest known name, or an empty string if none is close."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
