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


@dataclass(frozen=True)
class Row:
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


def _picks_vllm(value: object, machine: Machine) -> bool:
    return value == "vllm" or (value == "auto" and machine.has_gpu and machine.has_vllm)


def _is_not_default(key: str) -> Callable[[object, Machine], bool]:
    return lambda value, machine: value != FIELDS[key].get_default()


_ONE_WORKER = "one process: one worker on one device"
_ONE_ENGINE = "one embedded engine, which shares the policy's tensors"

TABLE: tuple[Row, ...] = (
    Row("trainer.strategy", _always, "one process holds the whole model; nothing is sharded"),
    Row("trainer.placement.colocate_all", _is_unset, "one process: training and rollouts share one device"),
    Row("trainer.placement.policy_num_nodes", _is_several, _ONE_WORKER),
    Row("trainer.placement.policy_num_gpus_per_node", _is_several, _ONE_WORKER),
    Row("trainer.placement.ref_num_nodes", _is_several, _ONE_WORKER),
    Row("trainer.placement.ref_num_gpus_per_node", _is_several, _ONE_WORKER),
    Row("trainer.placement.critic_num_nodes", _is_several, _ONE_WORKER),
    Row("trainer.placement.critic_num_gpus_per_node", _is_several, _ONE_WORKER),
    Row("trainer.bf16", _is_set_on_cpu, "a CPU computes in float32"),
    Row("trainer.flash_attn", _is_set, "PyTorch's SDPA, which has a flash kernel of its own on a GPU"),
    Row("generator.backend", _picks_vllm, "the embedded engine; vLLM engines are not part of this version"),
    Row("generator.num_inference_engines", _is_several, _ONE_ENGINE),
    Row("generator.inference_engine_tensor_parallel_size", _is_several, _ONE_ENGINE),
    Row("generator.weight_sync_backend", _always, "the engine generates with the policy's tensors; nothing is copied"),
    Row("generator.async_engine", _is_unset, "the embedded engine is always asynchronous"),
    Row(
        "generator.gpu_memory_utilization",
        _is_not_default("generator.gpu_memory_utilization"),
        "the bound of the embedded engine's KV cache; no memory is set aside for another engine",
    ),
    Row("generator.enforce_eager", _is_unset, "the embedded engine captures no CUDA graphs"),
)


def what_runs_here(cfg: SkyRLConfig, *, has_gpu: bool, has_vllm: bool) -> list[str]:
    """One line for each key whose value becomes something else in a one-process run on this machine."""
    machine = Machine(has_gpu=has_gpu, has_vllm=has_vllm)
    values = [(row, value_at(cfg, row.key)) for row in TABLE]
    return [f"{row.key}={show(value)}: {row.sentence}" for row, value in values if row.differs(value, machine)]
