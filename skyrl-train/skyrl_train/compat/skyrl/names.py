"""Names of SkyRL in this project's own modules, e.g. `skyrl_train.trainer.RayPPOTrainer`.

The modules do not know these names. An importer, which `skyrl_train` installs, lets each of them look up a missing
name here. Modules that exist for SkyRL's scripts only are files of three lines, which a test lists.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from skyrl_train.compat.skyrl.absent import MISSING_NAMES, AbsentModules, refuse_name

UTILS = {
    "Timer": "timer",
    "initialize_ray": "launch.ray.cluster",
    "validate_cfg": "entrypoints.command",
}

HOMES = {
    "entrypoints.main_base": {
        "BasePPOExp": "compat.skyrl.experiment",
        "skyrl_entrypoint": "compat.skyrl.entrypoint",
    },
    "entrypoints.main_generate": {"EvalOnlyEntrypoint": "compat.skyrl.experiment"},
    "generators.base": {
        "ConversationType": "inference_engines.base",
        "GeneratorInput": "compat.skyrl.generator",
        "GeneratorInterface": "compat.skyrl.generator",
        "GeneratorOutput": "compat.skyrl.generator",
        "TrainingPhase": "compat.skyrl.generator",
    },
    "inference_engines.base": {
        "InferenceEngineInput": "compat.skyrl.engine_client",
        "InferenceEngineOutput": "compat.skyrl.engine_client",
    },
    "trainer": {"RayPPOTrainer": "compat.skyrl.trainer"},
    "utils": UTILS,
    "utils.utils": UTILS,
}
"""Home of each name, by module. All modules are below `skyrl_train`."""


def install() -> None:
    """Let imports find SkyRL's names, and refuse those that do not exist with what to do instead."""
    sys.meta_path.insert(0, _Names())
    sys.meta_path.append(AbsentModules())  # asked last, for modules that do not exist


def find_name(module: str, name: str) -> Any:
    """Return SkyRL's `name` of a module. ImportError says what to do instead of using a name that does not exist."""
    from skyrl_train.entrypoints.command import importing_torch

    home = HOMES.get(module, {}).get(name)
    if home is None:
        refuse_name(module, name)
    with importing_torch():
        return getattr(import_module(f"skyrl_train.{home}"), name)


class _Names(MetaPathFinder):
    """An importer of the modules that have names of SkyRL."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != "skyrl_train" or not (module in HOMES or module in MISSING_NAMES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithNames(spec.loader, module)
        return spec


class _WithNames(Loader):
    """A loader that adds `find_name` as the `__getattr__` of its module."""

    def __init__(self, loader: Loader, module: str) -> None:
        self._loader, self._module = loader, module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.setdefault("__getattr__", partial(find_name, self._module))
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader of source files, such as `get_code`, which `python -m` calls."""
        return getattr(self._loader, name)
