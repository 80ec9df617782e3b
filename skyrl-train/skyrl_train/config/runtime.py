"""Keys whose value becomes something else in a run in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.base import value_at
from skyrl_train.config.problems import FIELDS, show
from skyrl_train.config.root import SkyRLConfig


@dataclass(frozen=True)
class Machine:
    """Hardware and packages that a run starts with."""

    has_gpu: bool
    has_vllm: bool
    runs_vllm: bool


_ONE_WORKER = "one process: one worker on one device"
_ONE_ENGINE = "one engine, in the trainer's process"
_MEMORY = "generator.gpu_memory_utilization"

# (key, condition on its value, what runs instead)
TABLE: tuple[tuple[str, Callable[[Any, Machine], bool], str], ...] = (
    ("trainer.strategy", lambda _, here: True, "one process holds the whole model; nothing is sharded"),
    (
        "trainer.placement.colocate_all",
        lambda value, here: not value,
        "one process: training and rollouts share one device",
    ),
    *(
        (f"trainer.placement.{role}_num_{unit}", lambda value, here: value != 1, _ONE_WORKER)
        for role in ("policy", "ref", "critic")
        for unit in ("nodes", "gpus_per_node")
    ),
    ("trainer.bf16", lambda value, here: value and not here.has_gpu, "a CPU computes in float32"),
    ("trainer.flash_attn", lambda value, here: value, "PyTorch's SDPA, which has a flash kernel of its own on a GPU"),
    (
        "generator.backend",
        lambda value, here: value == "vllm" and not here.has_vllm,
        "the embedded engine; vLLM is not installed",
    ),
    ("generator.num_inference_engines", lambda value, here: value != 1, _ONE_ENGINE),
    ("generator.inference_engine_tensor_parallel_size", lambda value, here: value != 1, _ONE_ENGINE),
    ("generator.weight_sync_backend", lambda _, here: True, "the engine is in the trainer's process; nothing is sent"),
    ("generator.async_engine", lambda value, here: not value, "engines are always asynchronous"),
    (
        _MEMORY,
        lambda value, here: value != FIELDS[_MEMORY].get_default(),
        "a share of the memory that training leaves free, not of all",
    ),
    (
        "generator.enforce_eager",
        lambda value, here: not (value or here.runs_vllm),
        "the embedded engine captures no CUDA graphs",
    ),
    (
        "generator.engine_init_kwargs",
        lambda value, here: value and not here.runs_vllm,
        "the embedded engine has no such options",
    ),
)


def what_runs_here(cfg: SkyRLConfig, *, has_gpu: bool, has_vllm: bool) -> list[str]:
    """Return one line for each key whose value becomes something else in a one-process run on this machine."""
    machine = Machine(has_gpu, has_vllm, runs_vllm=has_vllm and cfg.generator.backend == "vllm")
    rows = [(key, value_at(cfg, key), differs, instead) for key, differs, instead in TABLE]
    return [f"{key}={show(value)}: {instead}" for key, value, differs, instead in rows if differs(value, machine)]
