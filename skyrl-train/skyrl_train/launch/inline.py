"""A run in one process: one rank per model, and an engine that generates with the policy's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.policy import FSDPConfig, OptimizerConfig
from skyrl_train.config.run import RunConfig
from skyrl_train.distributed import SingleStrategy
from skyrl_train.distributed.strategy import hf_model
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.models.loading import default_device
from skyrl_train.types.specs import LoraSpec, ModelSpec, OptimizerSpec, Role, SyncKind, World
from skyrl_train.weight_sync import WeightSink, WeightSync
from skyrl_train.workers.group import WorkerGroup
from skyrl_train.workers.ranks import LocalRank

MAX_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Default of `trainer.max_tokens_per_microbatch`."""


class InlineLauncher:
    """A launcher whose models compute in `executor`, which has one thread."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.device = default_device()
        self.policy: PreTrainedModel | None = None

    async def start(self) -> None:
        pass

    async def load(self, spec: ModelSpec, objective: Objective | None) -> WorkerGroup:
        rank = LocalRank(self._executor, SingleStrategy(World(device=str(self.device))))
        group = WorkerGroup(spec, [rank], objective)
        await group.load()
        if spec.role == "policy":
            self.policy = hf_model(rank.worker.module)
        return group

    async def start_engine(self, make_engine: Callable[[PreTrainedModel | None], InferenceEngine]) -> InferenceEngine:
        return make_engine(self.policy)

    def bytes_beside_engine(self, n_bytes: int) -> int:
        return n_bytes

    def weight_sync(self, source: WorkerGroup, sinks: Mapping[str, WeightSink], kind: SyncKind = "full") -> WeightSync:
        return WeightSync(source, sinks, kind=kind)

    async def close(self) -> None:
        pass


def model_spec(
    role: Role,
    load: Callable[[], PreTrainedModel],
    save_tokenizer: Callable[[str], Any],
    cfg: RunConfig,
    temperature: float,
    optimizer: OptimizerSpec | None = None,
    lora: LoraSpec | None = None,
    device: torch.device | None = None,
    fsdp: FSDPConfig | None = None,
) -> ModelSpec:
    """Return the specification of one model of a run; `device` is that of its ranks, by default this process's."""
    return ModelSpec(
        role=role,
        load=load,
        save_tokenizer=save_tokenizer,
        optimizer=optimizer,
        lora=lora,
        fsdp=fsdp or FSDPConfig(),
        temperature=temperature,
        bf16=cfg.bf16,
        max_tokens_per_micro_batch=cfg.max_tokens_per_microbatch or MAX_TOKENS[(device or default_device()).type],
        max_rows_forward=cfg.micro_forward_batch_size_per_gpu,
        max_rows_train=cfg.micro_train_batch_size_per_gpu,
    )


def optimizer_spec(cfg: OptimizerConfig, n_steps: int) -> OptimizerSpec:
    """Return the specification of an optimizer whose schedule spans the `n_steps` optimizer steps of the run."""
    n_warmup_steps = cfg.num_warmup_steps or int(cfg.warmup_ratio * n_steps)
    return OptimizerSpec(
        lr=cfg.lr,
        betas=cfg.adam_betas,
        weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.max_grad_norm,
        scheduler=cfg.scheduler,
        n_warmup_steps=n_warmup_steps,
        n_steps=n_steps,
        n_decay_steps=round(cfg.wsd_decay_ratio * max(0, n_steps - n_warmup_steps)),
    )
