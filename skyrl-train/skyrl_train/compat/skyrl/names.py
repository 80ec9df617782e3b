"""SkyRL's names in our own modules, e.g. `skyrl_train.trainer.RayPPOTrainer`.

The modules themselves do not define these names. Instead, `skyrl_train` installs an importer that looks up a module's
missing names here. Modules that exist only for SkyRL's scripts have no files: the importer creates them.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from skyrl_train.compat.skyrl.absent import MISSING_NAMES, AbsentModules, refuse_name

UTILS = {"Timer": "compat.skyrl.timer", "initialize_ray": "compat.skyrl.cluster", "validate_cfg": "entrypoints.command"}

HOMES = {
    "config": dict.fromkeys(("get_default_config", "rewrite_overrides"), "compat.skyrl.hydra_scripts"),
    "config.utils": {"get_default_config": "compat.skyrl.hydra_scripts"},
    "entrypoints.main_base": {"BasePPOExp": "compat.skyrl.experiment", "skyrl_entrypoint": "compat.skyrl.entrypoint"},
    "dataset": {"PromptDataset": "dataset.prompts"},
    "entrypoints.main_generate": {"EvalOnlyEntrypoint": "compat.skyrl.experiment"},
    "entrypoints.main_sft": {"SFTExp": "entrypoints.sft"},
    "generators.base": dict.fromkeys(
        ("ConversationType", "GeneratorInput", "GeneratorInterface", "GeneratorOutput", "TrainingPhase"),
        "compat.skyrl.generator",
    ),
    "inference_engines.base": {
        "ConversationType": "compat.skyrl.generator",
        "InferenceEngineInput": "compat.skyrl.engine_client",
        "InferenceEngineOutput": "compat.skyrl.engine_client",
    },
    "trainer": {"RayPPOTrainer": "compat.skyrl.trainer"},
    "utils": UTILS,
    "utils.utils": UTILS,
}
"""The module that defines each name, by the module it is imported from. All are relative to `skyrl_train`."""

MODULES = {
    "config.preferences": "supervised_config",
    "config.sft": "supervised_config",
    "config.utils": None,
    "dataset.preprocess": "batch",
    "entrypoints.main_generate": None,
    "entrypoints.main_sft": None,
    "fully_async_trainer": "trainer",
    "generators.skyrl_gym_generator": "generator",
    "generators.utils": "generator_utils",
    "inference_engines.inference_engine_client": "engine_client",
    "inference_engines.ray_wrapped_inference_engine": "engine_client",
    "inference_engines.remote_inference_engine": "engine_client",
    "inference_engines.utils": "engine_client",
    "model_wrapper": "model_wrapper",
    "training_batch": "batch",
    "utils": None,
    "utils.ppo_utils": "algorithms",
    "utils.tracking": "tracking",
    "utils.trainer_utils": "trainer_utils",
    "utils.utils": None,
    "workers.fsdp": None,
    "workers.fsdp.fsdp_worker": "workers",
    "workers.megatron": None,
    "workers.megatron.megatron_worker": "workers",
}
"""Modules without a file, each with the module of `compat.skyrl` that has its names. With None, they are in `HOMES`."""

COMMANDS = {"entrypoints.main_generate": "generate", "entrypoints.main_sft": "sft"}
"""Modules whose `main` is a subcommand of `skyrl`. It imports PyTorch only after checking the configuration."""


def install() -> None:
    """Make SkyRL's names importable. For names that do not exist here, imports fail with a suggestion."""
    sys.meta_path.insert(0, _Names())
    sys.meta_path.append(AbsentModules())  # last, because it is for modules that no other importer finds


def find_name(module: str, name: str) -> Any:
    """Return SkyRL's `name` in a module. If it does not exist here, raise ImportError with a suggestion."""
    home = HOMES.get(module, {}).get(name)
    if home is None:
        refuse_name(module, name)
    from skyrl_train.entrypoints.command import importing_torch

    with importing_torch():
        return getattr(import_module(f"skyrl_train.{home}"), name)


class _Names(MetaPathFinder):
    """An importer for the modules in which SkyRL's scripts expect names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != "skyrl_train" or not (module in HOMES or module in MISSING_NAMES or module in MODULES):
            return None
        if module in MODULES:
            is_package = any(other.startswith(f"{module}.") for other in MODULES)
            # `python -m` makes the origin sys.argv[0].
            origin = str(Path(__file__).with_name(f"{MODULES[module] or 'names'}.py"))
            return ModuleSpec(fullname, _WithNames(_Copy(module), module), origin=origin, is_package=is_package)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithNames(spec.loader, module)
        return spec


class _Copy(Loader):
    """A loader for a module without a file. Its names are listed in `MODULES`, `COMMANDS` and `HOMES`."""

    def __init__(self, module: str) -> None:
        self._module = module

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of a program, for `python -m`. Child processes import the module without running it."""
        program = f"from {fullname} import main\nif __name__ == '__main__':\n    main()"
        return compile(program, f"<{fullname}>", "exec")

    def exec_module(self, module: ModuleType) -> None:
        if (home := MODULES[self._module]) is not None:
            original = import_module(f"skyrl_train.compat.skyrl.{home}")
            module.__dict__.update((name, getattr(original, name)) for name in original.__all__)
        if (command := COMMANDS.get(self._module)) is not None:
            from skyrl_train.entrypoints.cli import run_subcommand

            module.__dict__["main"] = partial(run_subcommand, command)


class _WithNames(Loader):
    """A loader that installs `find_name` as the module's `__getattr__`."""

    def __init__(self, loader: Loader, module: str) -> None:
        self._loader, self._module = loader, module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.setdefault("__getattr__", partial(find_name, self._module))
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped loader. `python -m` calls its `get_code`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
