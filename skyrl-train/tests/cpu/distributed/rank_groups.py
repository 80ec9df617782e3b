"""Groups of rank processes, and of one rank in this process to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from workers.worker_batches import largest_difference

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.distributed import SingleStrategy
from skyrl_train.launch.process import ProcessRank
from skyrl_train.launch.specs import model_spec, optimizer_spec
from skyrl_train.models.loading import load_model, load_value_model
from skyrl_train.types import Metrics, TrainingBatch
from skyrl_train.types.specs import ModelSpec, Role, World, lora_spec
from skyrl_train.workers.group import WorkerGroup
from skyrl_train.workers.ranks import LocalRank

BETAS = (0.9, 0.999)
EXACT = 1e-6


def spec(role: Role, path: Path, cfg: TrainerConfig, max_grad_norm: float = 1e9) -> ModelSpec:
    """Return the spec of a model in float32; its gradient is not clipped by default."""
    cpu = torch.device("cpu")
    load = load_value_model if role == "critic" else load_model
    optimizer = replace(
        optimizer_spec(cfg.policy.optimizer_config, "trainer.policy.optimizer_config", 10),
        max_grad_norm=max_grad_norm,
        betas=BETAS,
    )
    return model_spec(
        role,
        partial(load, str(path), dtype=torch.float32, device=cpu),
        partial(_save_nothing),
        cfg,
        cfg.algorithm.temperature,
        optimizer,
        lora_spec((cfg.critic if role == "critic" else cfg.policy).model, f"trainer.{role}.model.lora", cfg.seed),
    )


def _save_nothing(folder: str) -> None:
    """Do nothing; there is no tokenizer to save."""


def single_rank() -> LocalRank:
    return LocalRank(ThreadPoolExecutor(1), SingleStrategy(World()))


async def load_group(ranks: Any, spec: ModelSpec, objective: Objective) -> WorkerGroup:
    """Load a model on ranks; a single one computes whole rows."""
    if len(ranks) == 1:
        spec = replace(spec, sequence_parallel_size=1)
    group = WorkerGroup(spec, ranks, objective)
    await group.load()
    return group


async def save(group: WorkerGroup, folder: Path) -> Path:
    await (await group.save(folder))
    return folder


async def train_with_moves(group: WorkerGroup, batches: Sequence[TrainingBatch]) -> list[dict[str, float]]:
    """Return the metrics of an update on each batch, with the model in host memory in between, even with gradients."""
    metrics = []
    for batch in batches:
        await group.move("cpu")
        await group.move("device", "weights")
        await group.score(batch)
        await group.move("device")
        loss = await group.forward_backward(batch)
        assert await group.move("cpu") >= 2 * 4 * (await group.count_parameters())[0], "weights or gradients stayed"
        await group.move("device")
        metrics.append(loss.merge(await group.optim_step()).numbers())
    return metrics


async def first_gradient(
    group: WorkerGroup, spec: ModelSpec, objective: Objective, folder: Path
) -> dict[str, torch.Tensor]:
    """Return the gradient of a group's first optimizer step, recovered from the moments in its checkpoint."""
    rank = single_rank()
    await (await load_group([rank], spec, objective)).load_state(await save(group, folder))
    optimizer = rank.worker._state.optimizer
    assert optimizer is not None
    names = {id(parameter): name for name, parameter in rank.worker.module.named_parameters()}
    return {names[id(parameter)]: state["exp_avg"] / (1 - BETAS[0]) for parameter, state in optimizer.state.items()}


async def compare(
    ranks: list[ProcessRank],
    spec: ModelSpec,
    objective: Objective,
    batch: TrainingBatch,
    tmp_path: Path,
    tolerance: float = EXACT,
) -> None:
    """Assert that an optimizer step on `ranks` has the gradient and metrics of a step in this process."""
    results: list[tuple[dict[str, torch.Tensor], Metrics]] = []
    for name, group_ranks in (("single", [single_rank()]), ("sharded", ranks)):
        torch.manual_seed(0)  # clip_cov chooses tokens at random
        group = await load_group(group_ranks, spec, objective)
        metrics = await group.update(batch)
        results.append((await first_gradient(group, spec, objective, tmp_path / name), metrics))
    (single, single_metrics), (sharded, sharded_metrics) = results
    largest = max(values.abs().max().item() for values in single.values())
    assert largest > 1e-4
    difference = largest_difference(single, sharded)
    assert difference < tolerance * max(1.0, largest), f"gradients differ by {difference:.2g} of {largest:.2g}"
    assert sharded_metrics.numbers() == pytest.approx(single_metrics.numbers(), rel=1e-4, abs=1e-5)
