"""Rules for processes and for sharding models over them."""

import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, get_args

from skyrl_train.config.base import changed_fields, value_at
from skyrl_train.config.policy import DividedModelConfig, ShardedModelConfig
from skyrl_train.config.problems import show
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.config.run import PlacedRole, RunConfig, RunPlacementConfig
from skyrl_train.config.trainer import PlacementConfig


def launcher_starts_every_process(cfg: Any) -> Iterator[str]:
    """Reject multiple ranks or devices with `launcher=inline`."""
    placement: RunPlacementConfig = cfg.trainer.placement
    if placement.launcher != "inline":
        return
    for name, value in zip(("policy_num_nodes", "policy_num_gpus_per_node"), placement.size("policy"), strict=True):
        if value != 1:
            yield (
                f"trainer.placement.{name}={value} needs several ranks, but trainer.placement.launcher=inline runs "
                f"only one; set trainer.placement.launcher=ray, or trainer.placement.{name}=1"
            )
    if not placement.shares_devices:
        yield (
            "trainer.placement.colocate_all=false: trainer.placement.launcher=inline trains and samples on one "
            "device; set trainer.placement.launcher=ray, or trainer.placement.colocate_all=true"
        )


def devices_can_be_shared(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject a critic on the policy's GPUs that asks for another number, and asynchronous training on these GPUs."""
    placement = cfg.trainer.placement
    if cfg.trainer.critic.model.path is not None:
        yield from find_other_size(placement, "critic")
    is_shared = placement.uses_ray and placement.colocate_all and cfg.generator.n_local_engines > 0
    if cfg.trainer.fully_async.enabled and is_shared:
        yield (
            "trainer.fully_async.enabled=true trains and generates at the same time, but "
            "trainer.placement.colocate_all=true places both on the same GPUs; set "
            "trainer.placement.colocate_all=false, or trainer.fully_async.enabled=false"
        )


def find_other_size(placement: PlacementConfig, role: PlacedRole) -> Iterator[str]:
    """Yield a sentence for each node or GPU count of a colocated model that differs from the policy's."""
    if placement.colocate_all:
        sharing = "colocate_all"
    elif role == "ref" and placement.colocate_policy_ref:
        sharing = "colocate_policy_ref"
    else:
        return
    for key, value, policy_key, needed in _other_counts(placement, role):
        yield (
            f"{key}={value} must equal {policy_key}={needed} with trainer.placement.{sharing}=true; remove it, or set "
            f"trainer.placement.{sharing}=false"
        )


def find_unused_size(placement: PlacementConfig, role: PlacedRole, reason: str) -> Iterator[str]:
    """Yield a sentence for each node or GPU count set for a model that the run does not load."""
    for key, value, *_ in _other_counts(placement, role):
        yield f"{key}={value} has no effect, because {reason}; remove it"


def _other_counts(placement: PlacementConfig, role: PlacedRole) -> list[tuple[str, int, str, int]]:
    """Return (key, value, policy key, policy value) for each count of a model that differs from the policy's."""
    names = ("num_nodes", "num_gpus_per_node")
    counts = zip(names, placement.size(role), placement.size("policy"), strict=True)
    return [
        (f"trainer.placement.{role}_{name}", value, f"trainer.placement.policy_{name}", needed)
        for name, value, needed in counts
        if value != needed
    ]


def devices_are_used(cfg: Any) -> Iterator[str]:
    """Warn about Megatron-Core with a single rank, and GPUs of a critic or a reference that has none of its own."""
    if cfg.trainer.strategy_traits.is_model_parallel and _count_ranks(cfg.trainer.placement, "policy") == 1:
        yield (
            "trainer.strategy=megatron has no effect with a single rank of the policy, which holds the whole model; "
            "set trainer.placement.policy_num_gpus_per_node=2 or more, or trainer.strategy=fsdp2"
        )
    if not isinstance(cfg, SkyRLConfig):
        return
    placement = cfg.trainer.placement
    if cfg.trainer.critic.model.path is None:
        yield from find_unused_size(placement, "critic", "the run has no critic")
    if placement.colocate_all and not placement.colocate_policy_ref:
        yield (
            "trainer.placement.colocate_policy_ref=false has no effect with trainer.placement.colocate_all=true, which "
            "places all models on the same GPUs; remove it, or set trainer.placement.colocate_all=false"
        )


def idle_memory_is_shared(cfg: SkyRLConfig) -> Iterator[str]:
    """Reject offloading of idle models if no engine can use the freed memory."""
    placement, generator = cfg.trainer.placement, cfg.generator
    if placement.offload_idle is not True or cfg.offloads_idle(has_gpus=True):
        return
    if not placement.colocate_all:
        reason = "trainer.placement.colocate_all=false gives the engine separate devices"
        fix = "trainer.placement.colocate_all=true"
    elif not generator.run_engines_locally:
        reason, fix = "generator.run_engines_locally=false uses servers", "generator.run_engines_locally=true"
    elif cfg.trainer.fully_async.enabled:
        reason, fix = "trainer.fully_async.enabled=true keeps all of them busy", "trainer.fully_async.enabled=false"
    else:
        reason = f"generator.backend={generator.backend} generates with the policy's own tensors in one process"
        fix = "trainer.placement.launcher=ray"
    yield (
        "trainer.placement.offload_idle=true frees devices for an engine with its own copy of the weights, but "
        f"{reason}; set trainer.placement.offload_idle=auto, or {fix}"
    )


def packages_are_installed(cfg: Any) -> Iterator[str]:
    """Reject multi-process runs without Ray, and `strategy=megatron` without Megatron-Core."""
    placement: RunPlacementConfig = cfg.trainer.placement
    if placement.uses_ray and find_spec("ray") is None:
        ranks = " × ".join(map(str, placement.size("policy")))
        is_supervised = not isinstance(cfg, SkyRLConfig)
        other = "start the ranks with" if is_supervised else "train in one process with"
        yield (
            f"trainer.placement.launcher={placement.launcher} with {ranks} ranks of the policy needs Ray, which is not "
            "installed; run pip install -c constraints.txt -e './skyrl-train[ray]' in your clone of the repository (uv "
            f"sync and uv run: add --extra ray), or {other} "
            f"trainer.placement.launcher={'torchrun' if is_supervised else 'inline'}"
        )
    package = cfg.trainer.strategy_traits.package
    if package is not None and find_spec(package) is None:
        yield (
            "trainer.strategy=megatron needs Megatron-Core, which is not installed; run pip install -c constraints.txt "
            "-e './skyrl-train[mcore]' in your clone of the repository (uv sync and uv run: add --extra mcore), or set "
            "trainer.strategy=fsdp2"
        )


def strategy_fits_the_models(cfg: Any) -> Iterator[str]:
    """Reject settings of the other strategy, and models and settings that Megatron-Core does not support."""
    trainer: RunConfig = cfg.trainer
    is_model_parallel = trainer.strategy_traits.is_model_parallel
    unused, user = ("fsdp_config", "fsdp2") if is_model_parallel else ("megatron_config", "megatron")
    for role, section in _models(trainer).items():
        settings = getattr(section, unused, None)  # a critic has no megatron_config
        for name in sorted(changed_fields(settings)) if settings is not None else ():
            key = f"trainer.{role}.{unused}.{name}"
            yield (
                f"{key}={show(value_at(settings, name))} needs trainer.strategy={user}, not {trainer.strategy}; remove "
                f"{key}, or set trainer.strategy={user}"
            )
        if is_model_parallel and (size := section.sequence_parallel_size) > 1:
            replacement = f", and set trainer.{role}.megatron_config.context_parallel_size={size}"
            yield (
                f"trainer.{role}.sequence_parallel_size={size} needs trainer.strategy=fsdp2, not {trainer.strategy}; "
                f"remove it{replacement if isinstance(section, DividedModelConfig) else ''}"
            )
        if role == "critic" and section.model.path is not None and not trainer.strategy_traits.has_scalar_heads:
            yield (
                f"trainer.critic.model.path={show(section.model.path)}: Megatron-Core has no critic; set "
                "trainer.strategy=fsdp2, or an advantage_estimator without a critic"
            )
        megatron = section.megatron_config if is_model_parallel and isinstance(section, DividedModelConfig) else None
        if megatron is not None and megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
            key = f"trainer.{role}.megatron_config"
            yield (
                f"{key}.sequence_parallel=true divides tokens among the ranks that share a matrix, and "
                f"{key}.tensor_model_parallel_size=1 has none; set {key}.tensor_model_parallel_size=2"
            )


def _trained_models(trainer: RunConfig) -> list[tuple[PlacedRole, Any]]:
    """Return the trained models of a run with their sections."""
    models = _models(trainer).items()
    return [(role, section) for role, section in models if role != "ref" and section.model.path is not None]


def strategy_can_save_memory(cfg: Any) -> Iterator[str]:
    """Reject settings of low-memory training that Megatron-Core does not support."""
    trainer: RunConfig = cfg.trainer
    if not trainer.strategy_traits.is_model_parallel:
        return
    settings: dict[str, Any] = {"trainer.activation_offload": False}
    for role, _ in _trained_models(trainer):
        optimizer = f"trainer.{role}.optimizer_config"
        settings |= {f"trainer.{role}.model.train_dtype": "float32"}
        settings |= {f"{optimizer}.name": "adamw", f"{optimizer}.cpu_offload": False}
    for key, default in settings.items():
        if (value := value_at(cfg, key)) != default:
            yield (
                f"{key}={show(value)} needs trainer.strategy=fsdp2, not {trainer.strategy}; set "
                f"trainer.strategy=fsdp2, or {key}={show(default)}"
            )


def memory_settings_fit_the_ranks(cfg: Any) -> Iterator[str]:
    """Reject settings of low-memory training that several ranks do not support."""
    trainer: RunConfig = cfg.trainer
    for role, section in _trained_models(trainer):
        n_ranks = _count_ranks(trainer.placement, role)
        if n_ranks == 1 or trainer.strategy_traits.is_model_parallel:
            continue
        key, optimizer = f"trainer.{role}", section.optimizer_config
        if optimizer.cpu_offload:
            yield (
                f"{key}.optimizer_config.cpu_offload=true is for a single rank, and the {role} has {n_ranks}; set "
                f"{key}.optimizer_config.cpu_offload=false and {key}.fsdp_config.cpu_offload=true"
            )
        if optimizer.name == "muon":
            yield (
                f"{key}.optimizer_config.name=muon needs whole matrices, but the {n_ranks} ranks of the {role} shard "
                f"them; set {key}.optimizer_config.name=adamw or adamw_8bit"
            )
        if section.model.train_dtype == "bfloat16" and section.fsdp_config.param_dtype == "float32":
            yield (
                f"{key}.fsdp_config.param_dtype=float32 with {key}.model.train_dtype=bfloat16 would compute in another "
                f"dtype than the weights; set {key}.fsdp_config.param_dtype=auto"
            )
        if trainer.activation_offload:
            yield (
                f"trainer.activation_offload=true needs a single rank per model, and the {role} has {n_ranks}; set "
                "trainer.activation_offload=false and trainer.gradient_checkpointing=true"
            )


def _models(trainer: RunConfig) -> dict[PlacedRole, Any]:
    """Return the sections of the models of a run."""
    return {role: getattr(trainer, role) for role in get_args(PlacedRole) if hasattr(trainer, role)}


def sharding_fits_ranks(cfg: Any) -> Iterator[str]:
    """Reject group sizes that do not divide a model's ranks, and multi-rank settings with a single rank."""
    trainer: RunConfig = cfg.trainer
    for role, section in _models(trainer).items():
        n_ranks, counts = _count_ranks(trainer.placement, role), f"trainer.placement.{role}_num_gpus_per_node"
        if not hasattr(trainer.placement, f"{role}_num_gpus_per_node"):  # all models use the policy's ranks
            counts = "trainer.placement.policy_num_gpus_per_node"
        if not trainer.strategy_traits.is_model_parallel:
            yield from _fsdp_problems(role, section, n_ranks, counts)
        elif isinstance(section, DividedModelConfig) and n_ranks % section.megatron_config.n_ranks_of_copy:
            megatron = section.megatron_config
            yield (
                f"{megatron.describe_sizes(f'trainer.{role}.megatron_config')} must divide the "
                f"{_describe_ranks(n_ranks)} of the {role}; set {counts}={megatron.n_ranks_of_copy}, or lower one of "
                "them"
            )


def _count_ranks(placement: RunPlacementConfig, role: PlacedRole) -> int:
    """Return the number of ranks of a model. Under torchrun, it is `WORLD_SIZE`."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else math.prod(placement.size(role))


def _fsdp_problems(role: PlacedRole, section: ShardedModelConfig, n_ranks: int, counts: str) -> Iterator[str]:
    key, fsdp = f"trainer.{role}.fsdp_config", section.fsdp_config
    if n_ranks % section.sequence_parallel_size:
        yield (
            f"trainer.{role}.sequence_parallel_size={section.sequence_parallel_size} must divide the "
            f"{_describe_ranks(n_ranks)} of the {role}; try {_divisors(n_ranks)}, or set "
            f"{counts}={section.sequence_parallel_size}"
        )
    n_shards = n_ranks if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    if n_shards == 0 or n_ranks % n_shards:
        yield (
            f"{key}.fsdp_size={fsdp.fsdp_size} must divide the {_describe_ranks(n_ranks)} of the {role}; try "
            f"{_divisors(n_ranks)}, or -1 to shard over all ranks"
        )
        return  # without a valid number of shards, their groups cannot be checked
    group_size = fsdp.reshard_after_forward
    choices = [n for n in range(2, n_shards) if n_shards % n == 0]
    if not isinstance(group_size, bool) and group_size not in choices:
        allowed = f"{' or '.join(map(str, choices))}, or " if choices else ""
        yield (
            f"{key}.reshard_after_forward={group_size} must divide {n_shards}, the number of ranks that share the "
            f"weights, and be neither 1 nor {n_shards}; set it to {allowed}true or false"
        )
    ignored = {"cpu_offload": fsdp.cpu_offload, "param_dtype": fsdp.param_dtype != "auto"} if n_ranks == 1 else {}
    for name in (name for name, is_set in ignored.items() if is_set):
        yield (
            f"{key}.{name}={show(value_at(fsdp, name))} has no effect on a single rank, which does not use FSDP2; set "
            f"{counts}=2 or more, or remove it"
        )


def _describe_ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"


def _divisors(n: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, n + 1) if n % divisor == 0)
