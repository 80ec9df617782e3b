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
from types import CodeType, ModuleType
from typing import Any

from skyrl_train.compat.skyrl.absent import MISSING_NAMES, AbsentModules, refuse_name


def _from(home: str, *names: str) -> dict[str, str]:
    """Return names that a module defines under the same name."""
    return {name: f"{home}:{name}" for name in names}


_INTERFACE = ("ConversationType", "GeneratorInput", "GeneratorInterface", "GeneratorOutput", "TrainingPhase")
_SUPERVISED = ("DPOConfig", "PreferenceDataConfig", "RewardConfig", "SFTConfig", "SFTDataConfig")
_UTILS = {
    **_from("compat.skyrl.timer", "Timer"),
    **_from("compat.skyrl.cluster", "initialize_ray"),
    **_from("entrypoints.command", "validate_cfg"),
}

NAMES = {
    "config": _from("compat.skyrl.hydra_scripts", "get_default_config", "rewrite_overrides"),
    "config.preferences": _from("config.supervised", *_SUPERVISED),
    "config.sft": _from("config.supervised", *_SUPERVISED),
    "config.utils": _from("compat.skyrl.hydra_scripts", "get_default_config"),
    "dataset": _from("dataset.prompts", "PromptDataset"),
    "dataset.preprocess": _from("compat.skyrl.batch", "convert_prompts_responses_to_batch_tensors"),
    "entrypoints.main_base": {
        **_from("compat.skyrl.experiment", "BasePPOExp"),
        **_from("compat.skyrl.entrypoint", "skyrl_entrypoint"),
    },
    "entrypoints.main_generate": _from("compat.skyrl.experiment", "EvalOnlyEntrypoint"),
    "entrypoints.main_sft": _from("entrypoints.sft", "SFTExp"),
    "fully_async_trainer": _from("compat.skyrl.trainer", "FullyAsyncRayPPOTrainer"),
    "generators.base": _from("compat.skyrl.generator", *_INTERFACE),
    "generators.skyrl_gym_generator": _from(
        "compat.skyrl.generator", "GeneratorInput", "GeneratorOutput", "SkyRLGymGenerator"
    ),
    "generators.utils": {
        **_from(
            "compat.skyrl.generator_utils",
            "apply_overlong_filtering",
            "concatenate_generator_outputs",
            "encode_messages_subset",
            "get_generation_prompt_ids",
            "get_response_ids_and_loss_mask_from_messages",
            "get_rollout_metrics",
        ),
        "get_custom_chat_template": "generators.chat_template:load_chat_template",
    },
    "inference_engines.base": {
        **_from("compat.skyrl.generator", "ConversationType"),
        **_from("compat.skyrl.engine_client", "InferenceEngineInput", "InferenceEngineOutput"),
    },
    "inference_engines.inference_engine_client": _from("compat.skyrl.engine_client", "InferenceEngineClient"),
    "inference_engines.ray_wrapped_inference_engine": {
        "RayWrappedInferenceEngine": "inference_engines.remote:RemoteEngine"
    },
    "inference_engines.remote_inference_engine": {"RemoteInferenceEngine": "inference_engines.http:HTTPEngine"},
    "inference_engines.utils": _from("compat.skyrl.engine_client", "get_sampling_params_for_backend"),
    "model_wrapper": _from("compat.skyrl.model_wrapper", "HFModelWrapper"),
    "trainer": _from("compat.skyrl.trainer", "RayPPOTrainer"),
    "training_batch": _from("compat.skyrl.batch", "TrainingInputBatch"),
    "utils": _UTILS,
    "utils.ppo_utils": {
        **_from(
            "compat.skyrl.algorithms",
            "AdaptiveKLController",
            "FixedKLController",
            "compute_advantages_and_returns",
            "normalize_advantages_dict",
            "reduce_loss",
        ),
        **_from("algorithms.masked", "masked_mean", "masked_var", "masked_whiten"),
        **_from("algorithms.registry", "register_advantage_estimator", "register_policy_loss"),
        "AdvantageEstimatorRegistry": "algorithms.registry:ADVANTAGE_ESTIMATORS",
        "PolicyLossRegistry": "algorithms.registry:POLICY_LOSSES",
        "compute_approx_kl": "algorithms.kl:compute_approx_kl",
        "compute_gae_advantage_return": "algorithms.advantages:gae",
        "compute_grpo_outcome_advantage": "algorithms.advantages:grpo",
        "compute_policy_loss_cispo": "algorithms.losses:cispo",
        "compute_policy_loss_clip_cov": "algorithms.losses:clip_cov",
        "compute_policy_loss_kl_cov": "algorithms.losses:kl_cov",
        "compute_reinforce_plus_plus_outcome_advantage": "algorithms.advantages:reinforce_plus_plus",
        "compute_rloo_outcome_advantage": "algorithms.advantages:rloo",
        "get_kl_controller": "algorithms.kl:kl_controller",
        "gspo_policy_loss": "algorithms.losses:gspo",
        "ppo_policy_loss": "algorithms.losses:clipped_surrogate",
        "sapo_policy_loss": "algorithms.losses:sapo",
    },
    "utils.tracking": _from("compat.skyrl.tracking", "Tracking"),
    "utils.trainer_utils": _from(
        "compat.skyrl.trainer_utils", "ResumeMode", "validate_generator_output", "zero_variance_filter"
    ),
    "utils.utils": _UTILS,
    "workers.fsdp": {},
    "workers.fsdp.fsdp_worker": dict.fromkeys(("CriticWorker", "PolicyWorker", "RefWorker"), "workers.worker:Worker"),
    "workers.megatron": {},
    "workers.megatron.megatron_worker": dict.fromkeys(
        ("CriticWorker", "PolicyWorker", "RefWorker"), "workers.worker:Worker"
    ),
}
"""The module and attribute that SkyRL's names stand for, by the module that scripts import them from. All modules are
relative to `skyrl_train`."""

COMMANDS = {"entrypoints.main_generate": "generate", "entrypoints.main_sft": "sft"}
"""Modules whose `main` is a subcommand of `skyrl`. It imports PyTorch only after checking the configuration."""


def install() -> None:
    """Make SkyRL's names importable. For names that do not exist here, imports fail with a suggestion."""
    sys.meta_path.insert(0, _Names())
    sys.meta_path.append(AbsentModules())  # last, because it is for modules that no other importer finds


def find_name(module: str, name: str) -> Any:
    """Return SkyRL's `name` in a module. If it does not exist here, raise ImportError with a suggestion."""
    if name == "main" and module in COMMANDS:
        from skyrl_train.entrypoints.cli import run_subcommand

        return partial(run_subcommand, COMMANDS[module])
    home, _, attribute = NAMES.get(module, {}).get(name, "").partition(":")
    if not home:
        refuse_name(module, name)
    from skyrl_train.entrypoints.command import importing_torch

    with importing_torch():
        return getattr(import_module(f"skyrl_train.{home}"), attribute)


class _Names(MetaPathFinder):
    """An importer for the modules in which SkyRL's scripts expect names. It creates the modules without a file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != "skyrl_train" or not (module in NAMES or module in MISSING_NAMES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            is_package = any(other.startswith(f"{module}.") for other in NAMES)
            # `python -m` makes the origin sys.argv[0].
            return ModuleSpec(fullname, _WithNames(_NoFile(), module), origin=__file__, is_package=is_package)
        if spec.loader is not None:
            spec.loader = _WithNames(spec.loader, module)
        return spec


class _NoFile(Loader):
    """A loader for a module without a file."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of a program, for `python -m`. Child processes import the module without running it."""
        program = f"from {fullname} import main\nif __name__ == '__main__':\n    main()"
        return compile(program, f"<{fullname}>", "exec")

    def exec_module(self, module: ModuleType) -> None:
        """List the module's names for `from … import *`."""
        _, _, name = module.__name__.partition(".")
        module.__dict__["__all__"] = [*NAMES[name]]


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
