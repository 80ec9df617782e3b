"""Import `skyrl.train.X` and `skyrl.backends.skyrl_train.X` as `skyrl_train.X`.

These modules have no files. Each is a facade that reads its attributes from its home, a module of `skyrl_train` or of
this package:

    from skyrl.train.generators.base import GeneratorInterface  # skyrl_train.generators.base.GeneratorInterface

The home refuses names without a counterpart, as in the old layout (`skyrl_train.compat.skyrl.absent`).
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType
from typing import Any

SERVERS = "skyrl.backends.skyrl_train.inference_servers"

MODULES = {
    "skyrl.backends": "skyrl_train",
    f"{SERVERS}.engine_utils": "skyrl_train.inference_engines.utils",
    "skyrl.backends.skyrl_train.workers.model_wrapper": "skyrl_train.model_wrapper",
    "skyrl.train.config": "skyrl.config",
    "skyrl.train.fully_async_trainer": "skyrl.trainer",
    "skyrl.train.main_sft": "skyrl_train.entrypoints.main_sft",
    "skyrl.train.trainer": "skyrl.trainer",
}
"""Homes of modules that are renamed, or whose contents differ."""

PACKAGES = {
    SERVERS: "skyrl_train.inference_engines",
    "skyrl.backends.skyrl_train": "skyrl_train",
    "skyrl.env_vars": "skyrl_train.env_vars",
    "skyrl.train": "skyrl_train",
    "skyrl.utils": "skyrl_train.utils",
}
"""Homes of packages and of all modules below them that are not in `MODULES`. The first match counts."""

NAMES = {
    f"{SERVERS}.base": {
        "InferenceEngineInterface": ("skyrl_train.inference_engines.inference_engine_client", "InferenceEngineClient")
    }
}
"""Names that are not in the home of their module, by module: the module that has them, and their name there."""


def find_home(module: str) -> str | None:
    """Return the home of a module of the new layout, or None for other modules."""
    for package, home in PACKAGES.items():
        if module == package or module.startswith(f"{package}."):
            return MODULES.get(module, home + module.removeprefix(package))
    return MODULES.get(module)


class Layout(MetaPathFinder):
    """An importer of facades."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        home = find_home(fullname)
        spec = None if home is None else find_spec(home)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None or fullname == "skyrl.train.config"
        return spec_from_loader(fullname, Facade(spec.name), is_package=is_package)


class Facade(Loader):
    """A loader for a module that only forwards to its home."""

    def __init__(self, home: str) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        """Read the attributes of `module` from its home."""
        home, name = import_module(self._home), module.__name__
        module.__doc__ = home.__doc__

        def read(attribute: str) -> Any:
            if attribute in NAMES.get(name, {}):
                owner, original = NAMES[name][attribute]
                return getattr(import_module(owner), original)
            value = getattr(home, attribute)
            is_inner = isinstance(value, ModuleType) and find_home(f"{name}.{attribute}") is not None
            return import_module(f"{name}.{attribute}") if is_inner else value

        module.__dict__["__getattr__"] = read

    def get_code(self, fullname: str) -> CodeType:
        """Return code that runs the home as a program, for `python -m`."""
        program = f"from runpy import run_module; run_module({self._home!r}, run_name='__main__', alter_sys=True)"
        return compile(program, f"<{fullname}>", "exec")
