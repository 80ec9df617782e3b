"""What an accepted key becomes in a run in one process, where that is not what the key says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from skyrl_train.config.base import value_at
from skyrl_train.config.problems import FIELDS, show
from skyrl_train.config.root import SkyRLConfig


@dataclass(frozen=True)
class Machine:
    """What a run finds where it starts."""

    has_gpu: bool
    has_vllm: bool
    runs_vllm: bool


@dataclass(frozen=True)
class Substitution:
    """A key, whether its value runs as something else here, and as what."""

    key: str
    differs: Callable[[object, Machine], bool]
    sentence: str


def _always(value: object, machine: Machine) -> bool:
    return True


def _is_set(value: object, machine: Machine) -> bool:
    return value is True


def _is_unset(value: object, machine: Machine) -> bool:
    return value is False


def _is_several(value: object, machine: Machine) -> bool:
    return value != 1


def _is_set_on_cpu(value: object, machine: Machine) -> bool:
    return value is True and not machine.has_gpu


def _is_unset_without_vllm(value: object, machine: Machine) -> bool:
    return value is False and not machine.runs_vllm


def _is_given_without_vllm(value: object, machine: Machine) -> bool:
    return bool(value) and not machine.runs_vllm


def _is_missing_vllm(value: object, machine: Machine) -> bool:
    return value == "vllm" and not machine.has_vllm


def _is_not_default(key: str) -> Callable[[object, Machine], bool]:
    return lambda value, machine: value != FIELDS[key].get_default()


_ONE_WORKER = "one process: one worker on one device"
_ONE_ENGINE = "one engine, in the trainer's process"

TABLE: tuple[Substitution, ...] = (
    Substitution("trainer.strategy", _always, "one process holds the whole model; nothing is sharded"),
    Substitution("trainer.placement.colocate_all", _is_unset, "one process: training and rollouts share one device"),
    Substitution("trainer.placement.policy_num_nodes", _is_several, _ONE_WORKER),
    Substitution("trainer.placement.policy_num_gpus_per_node", _is_several, _ONE_WORKER),
    Substitution("trainer.placement.ref_num_nodes", _is_several, _ONE_WORKER),
    Substitution("trainer.placement.ref_num_gpus_per_node", _is_several, _ONE_WORKER),
    Substitution("trainer.placement.critic_num_nodes", _is_several, _ONE_WORKER),
    Substitution("trainer.placement.critic_num_gpus_per_node", _is_several, _ONE_WORKER),
    Substitution("trainer.bf16", _is_set_on_cpu, "a CPU computes in float32"),
    Substitution("trainer.flash_attn", _is_set, "PyTorch's SDPA, which has a flash kernel of its own on a GPU"),
    Substitution("generator.backend", _is_missing_vllm, "the embedded engine; vLLM is not installed"),
    Substitution("generator.num_inference_engines", _is_several, _ONE_ENGINE),
    Substitution("generator.inference_engine_tensor_parallel_size", _is_several, _ONE_ENGINE),
    Substitution("generator.weight_sync_backend", _always, "the engine is in the trainer's process; nothing is sent"),
    Substitution("generator.async_engine", _is_unset, "engines are always asynchronous"),
    Substitution(
        "generator.gpu_memory_utilization",
        _is_not_default("generator.gpu_memory_utilization"),
        "a share of the memory that training leaves free, not of all",
    ),
    Substitution("generator.enforce_eager", _is_unset_without_vllm, "the embedded engine captures no CUDA graphs"),
    Substitution("generator.engine_init_kwargs", _is_given_without_vllm, "the embedded engine has no such options"),
)


def what_runs_here(cfg: SkyRLConfig, *, has_gpu: bool, has_vllm: bool) -> list[str]:
    """One line for each key whose value becomes something else in a one-process run on this machine."""
    machine = Machine(has_gpu, has_vllm, runs_vllm=has_vllm and cfg.generator.backend == "vllm")
    values = [(row, value_at(cfg, row.key)) for row in TABLE]
    return [f"{row.key}={show(value)}: {row.sentence}" for row, value in values if row.differs(value, machine)]
