"""Groups of rank processes, and one rank in this process to compare them with."""

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.entrypoints.load_learner import model_spec
from skyrl_train.launch import process
from skyrl_train.launch.process import LocalRank, ProcessRank, RankHost
from skyrl_train.models.loading import load_model
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import ModelSpec, OptimizerSpec, Role, World, lora_spec
from skyrl_train.workers.group import Rank, WorkerGroup
from train_kit.models import CPU
from train_kit.processes import forked_multiprocessing, zygote
from train_kit.workers import complete, config, policy_objective

BETAS = (0.9, 0.999)

# -- processes


def start_ranks(n_ranks: int, *preloaded: str) -> list[ProcessRank]:
    """Start ranks as the product does, but from a zygote that has imported these modules, too."""
    with forked_multiprocessing():
        if "TEST_REAL_PYTHON" not in os.environ:
            for module in preloaded:
                zygote().preload(module)
        return process.start_ranks(n_ranks)


@asynccontextmanager
async def new_ranks(n_ranks: int, *preloaded: str) -> AsyncIterator[list[ProcessRank]]:
    """Start ranks for one test, which may kill them."""
    ranks = start_ranks(n_ranks, *preloaded)
    try:
        yield ranks
    finally:
        await close(ranks)


async def close(ranks: Sequence[ProcessRank]) -> None:
    for rank in ranks:
        await rank.close()


class SharedRanks:
    """Groups of ranks that several tests use, one for each number of ranks."""

    def __init__(self, *preloaded: str) -> None:
        """Start ranks, when a test asks for them, from a zygote that has imported the modules `preloaded`."""
        self._preloaded = preloaded
        self._groups: dict[int, list[ProcessRank]] = {}

    @contextmanager
    def borrow(self, n_ranks: int) -> Iterator[list[ProcessRank]]:
        """Lend a group to a test, and discard it if a rank has ended or hangs: the next test gets a new one."""
        if n_ranks not in self._groups:
            self._groups[n_ranks] = start_ranks(n_ranks, *self._preloaded)
        yield self._groups[n_ranks]
        if not all(_is_usable(rank) for rank in self._groups[n_ranks]):
            self._close(n_ranks)

    def close(self) -> None:
        for n_ranks in list(self._groups):
            self._close(n_ranks)

    def _close(self, n_ranks: int) -> None:
        complete(close(self._groups.pop(n_ranks)))


def _is_usable(rank: ProcessRank) -> bool:
    with suppress(TimeoutError):
        rank._thread.submit(int).result(timeout=1)  # runs after the last call
        return rank._process.is_alive()
    return False


# -- models


def spec(role: Role, path: Path, cfg: TrainerConfig, *, max_grad_norm: float = 1e9, **loading: Any) -> ModelSpec:
    """Return the spec of a model in float32; its gradient is not clipped by default."""
    section = cfg.critic if role == "critic" else cfg.policy
    optimizer = cfg.policy.optimizer_config.model_copy(update={"max_grad_norm": max_grad_norm, "adam_betas": BETAS})
    load = partial(load_model, str(path), role, **{"dtype": torch.float32, "device": CPU} | loading)
    return replace(
        model_spec(role, load, save_no_tokenizer, cfg, cfg.algorithm.temperature),
        optimizer=OptimizerSpec(optimizer, 10),
        lora=lora_spec(section.model, f"trainer.{role}.model.lora", cfg.seed),
        train_dtype=section.model.train_dtype,
    )


def save_no_tokenizer(folder: str) -> None:
    """Do nothing; there is no tokenizer to save."""


def single_rank() -> LocalRank:
    return LocalRank(ThreadPoolExecutor(1), RankHost(World()))


async def load_group(ranks: Sequence[Rank], spec: ModelSpec, objective: Objective | None = None) -> WorkerGroup:
    """Load a model on ranks; a single one computes whole rows."""
    if len(ranks) == 1:
        spec = replace(spec, sequence_parallel_size=1)
    group = WorkerGroup(spec, ranks, objective)
    await group.load()
    return group


async def load_policy(ranks: Sequence[Rank], path: Path, **trainer: Any) -> WorkerGroup:
    """Load a policy that minimizes the loss of PPO on ranks; `trainer` overrides the configuration."""
    cfg = config(**trainer).trainer
    return await load_group(ranks, spec("policy", path, cfg), policy_objective(cfg))


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
        assert await group.move("cpu") >= 2 * 4 * group.facts.n_trained, "weights or gradients stayed"
        await group.move("device")
        metrics.append(loss.merge(await group.optim_step()).numbers())
    return metrics


def read_gradient(folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradient of the first optimizer step, recovered from the moments in the checkpoint after it."""
    reader = dcp.FileSystemReader(folder)
    items = reader.read_metadata().state_dict_metadata.items()
    moments = {
        name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in items if name.endswith(".exp_avg")
    }
    dcp.load(moments, storage_reader=reader, no_dist=True)
    return {name: moment / (1 - BETAS[0]) for name, moment in moments.items()}
