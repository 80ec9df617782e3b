"""A run in one process: one rank per model, and an engine that generates with the policy's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.policy import OptimizerConfig
from skyrl_train.config.run import RunConfig
from skyrl_train.distributed import SingleStrategy
from skyrl_train.distributed.strategy import hf_model
from skyrl_train.models.loading import default_device
from skyrl_train.types.specs import LoraSpec, ModelSpec, OptimizerSpec, Role, World
from skyrl_train.workers.group import WorkerGroup
from skyrl_train.workers.ranks import LocalRank

MAX_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Default of `trainer.max_tokens_per_microbatch`."""


async def load_inline(
    spec: ModelSpec, objective: Objective | None, executor: Executor
) -> tuple[WorkerGroup, PreTrainedModel]:
    """Load a model in this process; return its group, and the model for an engine that shares its tensors.

    The model computes in `executor`, which has one thread.
    """
    rank = LocalRank(executor, SingleStrategy(World(device=str(default_device()))))
    group = WorkerGroup(spec, [rank], objective)
    await group.load()
    return group, hf_model(rank.worker.module)


def model_spec(
    role: Role,
    load: Callable[[], PreTrainedModel],
    save_tokenizer: Callable[[str], Any],
    cfg: RunConfig,
    temperature: float,
    optimizer: OptimizerSpec | None = None,
    lora: LoraSpec | None = None,
) -> ModelSpec:
    """Return the specification of one model of a run."""
    return ModelSpec(
        role=role,
        load=load,
        save_tokenizer=save_tokenizer,
        optimizer=optimizer,
        lora=lora,
        temperature=temperature,
        bf16=cfg.bf16,
        max_tokens_per_micro_batch=cfg.max_tokens_per_microbatch or MAX_TOKENS[default_device().type],
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
