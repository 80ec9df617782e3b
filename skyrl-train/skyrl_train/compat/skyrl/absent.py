"""Modules, names, methods and attributes of SkyRL that do not exist here, each with a replacement to suggest."""

from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from skyrl_train.errors import ConfigError

GUIDE = "docs/guides/coming-from-skyrl.md"

_ENGINES = "the experiment starts the engines of `generator`; override get_engine for a custom one"
_GPT_OSS = "gpt-oss needs no patches, because attention and experts come from transformers"
_LIMITS = "set trainer.fully_async.num_parallel_generation_workers, or limit the requests in your generator"
_OWN_LOOP = "keep the training loop; to train asynchronously, return a FullyAsyncRayPPOTrainer from get_trainer"
_WORKERS = "models live in `learner.policy`, `learner.critic` and `learner.ref`; override update(step, batch)"
_SFT = "run `skyrl sft`"
_CALLBACKS = "subclass skyrl_train.callbacks.Callback, and return it from the experiment's get_callbacks"

MODULES = {
    "config.sft_config": _SFT,
    "env_vars": "there are no such variables; trainer.placement has the time limits",
    "skyrl_gym.envs.rlm": "write the environment and its model calls as a generator",
    "fully_async_trainer_sim": "train with FullyAsyncRayPPOTrainer and a tiny model (`skyrl tiny`)",
    "inference_engines.common": _ENGINES,
    "inference_engines.remote_inference_client": _ENGINES,
    "inference_engines.server_group": _ENGINES,
    "inference_engines.vllm.vllm_engine": _ENGINES,
    "patches": _GPT_OSS,
    "sft_trainer": _SFT,
    "utils.callbacks": _CALLBACKS,
    "utils.profiler": "time a block with skyrl_train.utils.Timer",
    "utils.rate_limiter": _LIMITS,
    "workers.worker_dispatch": _WORKERS,
    "workers.worker_utils": _WORKERS,
}
"""SkyRL modules, relative to `skyrl_train` unless they start with another package."""

MISSING_NAMES: dict[str, dict[str, str]] = {
    "config": {"InferenceEngineConfig": "the engine's keys are in `generator`"},
    "entrypoints.main_base": {
        "create_ray_wrapped_inference_engines_from_config": _ENGINES,
        "create_remote_inference_engines_from_config": _ENGINES,
    },
    "evaluate": {"evaluate_step_wise": "evaluate also plays step-wise trajectories"},
    "generators.skyrl_gym_generator": {
        "StepWiseOutput": "rollout(requests, sampling, metadata) returns a Trajectory of several segments",
        "TrajectoryOutput": "rollout(requests, sampling, metadata) returns a Trajectory",
    },
    "generators.utils": {
        "get_metrics_from_generator_output": "the trainer itself logs reward metrics",
        "prepare_generator_input": _OWN_LOOP,
    },
    "inference_engines.base": {"InferenceEngineInterface": "use InferenceEngineClient for type annotations"},
    "inference_engines.utils": {"build_vllm_cli_args": _ENGINES, "route_prompts_to_engines": _ENGINES},
    "model_wrapper": {"logprobs_from_logits": "use torch.log_softmax, and gather the tokens"},
    "training_batch": {
        "TensorBatch": "the trainer makes batches; hooks get a TrainingInputBatch",
        "TrainingOutputBatch": "hooks get a TrainingInputBatch",
    },
    "utils": {
        "get_all_env_variables": _ENGINES,
        "get_ray_pg_ready_with_timeout": "the launcher makes placement groups; set trainer.placement",
        "prepare_runtime_environment": "set variables in the environment of the script",
        "ray_noset_visible_devices": "the launcher assigns GPUs; set trainer.placement",
        "validate_generator_cfg": "call validate_cfg",
    },
    "utils.ppo_utils": {
        "apply_loss_reduction_to_advantages_minibatch": "the trainer reduces losses; set "
        "trainer.algorithm.loss_reduction",
        "sync_registries": "register in the task, or before initialize_ray",
    },
    "utils.trainer_utils": {"run_on_each_node": "checkpoints are written to and read from trainer.ckpt_path"},
    "weight_sync": {
        "LoraLoadRequest": "override sync_weights(step) of the trainer",
        "WeightChunk": "override sync_weights(step) of the trainer",
        "WeightUpdateRequest": "override sync_weights(step) of the trainer",
    },
    "workers.worker": dict.fromkeys(
        ("CriticWorkerBase", "DistributedTorchRayActor", "PPORayActorGroup", "PolicyWorkerBase", "RefWorkerBase"),
        _WORKERS,
    ),
}
"""SkyRL names by module, relative to `skyrl_train`."""
MISSING_NAMES["utils.utils"] = MISSING_NAMES["utils"]

TRAINER_METHODS = {
    "_remove_tail_data": "override get_prompts of the experiment",
    "build_dataloader": "override get_prompts of the experiment",
    "build_models": "override get_model of the experiment",
    "convert_to_training_input": "override build_batch",
    "dump_data": "add a callback",
    "fwd_logprobs_values_reward": "override score",
    "generate": "override generate of the generator",
    "handle_dynamic_sampling": "override rollout",
    "init_weight_sync_state": "override sync_weights",
    "load_checkpoints": "override resume",
    "pad_batch": "override build_batch",
    "run_training": "override update",
    "save_checkpoints": "override save_checkpoint",
    "save_models": "override export",
    "sync_policy_weights_to_inference_engines": "override sync_weights",
    "train_critic_and_policy": "override update",
    "update_ref_with_policy": "add a callback",
}

TRAINER_ATTRIBUTES = {
    "critic_model": "use learner.critic",
    "eval_dataloader": "use eval_dataset",
    "policy_model": "use learner.policy",
    "ref_model": "use learner.ref",
    "train_dataloader": "use train_dataset",
}

EXPERIMENT_METHODS = {
    "_setup_trainer": "override get_model, get_engine, get_generator, get_callbacks or get_trainer",
    "get_colocate_pg": "set trainer.placement",
    "get_inference_client": "override get_engine",
}

CLIENT_METHODS = {
    "chat_completion": "use generate, or an AgentGenerator",
    "completion": "use generate, or an AgentGenerator",
    "pause_generation": "use pause",
    "resume_generation": "use resume",
}
"""Methods of `InferenceEngineClient`."""


def refuse_overrides(cls: type, base: type, absent: Mapping[str, str]) -> None:
    """Raise ConfigError if `cls` overrides one of the `absent` methods, because nothing would call it."""
    for name, instead in absent.items():
        if getattr(cls, name, None) is not getattr(base, name, None):
            raise ConfigError(f"{cls.__name__}.{name} would never be called; {instead} instead ({GUIDE})")


def describe_missing(owner: object, name: str, absent: Mapping[str, str]) -> str:
    """Return the message of an AttributeError. If the name is one of `absent`, suggest the replacement."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in absent:
        message += f", which SkyRL has; {absent[name]} instead ({GUIDE})"
    return message


def refuse_name(module: str, name: str) -> NoReturn:
    """Raise ImportError with the replacement for one of `MISSING_NAMES`, and AttributeError for any other name."""
    instead = MISSING_NAMES.get(module, {}).get(name)
    if instead is None:
        raise AttributeError(f"module 'skyrl_train.{module}' has no attribute {name!r}")
    raise ImportError(f"SkyRL's {name} does not exist here; {instead} ({GUIDE})", name=name)


class AbsentModules(MetaPathFinder):
    """An importer that raises ModuleNotFoundError with the replacement for each of `MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = fullname.removeprefix("skyrl_train.")
        if module in MODULES and fullname.startswith(("skyrl_gym.", "skyrl_train.")):
            raise ModuleNotFoundError(
                f"SkyRL's module {module} does not exist here; {MODULES[module]} ({GUIDE})", name=fullname
            )
        return None
