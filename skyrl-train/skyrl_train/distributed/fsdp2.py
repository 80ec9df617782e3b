"""Fully sharded data parallelism: every rank holds a slice of each parameter and gathers one block at a time."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.distributed.strategy import DistributedStrategy, hf_model
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types.specs import World


class FSDP2Strategy(DistributedStrategy):
    """A strategy that shards each transformer block and, as the root, the rest: embeddings, final norm and head.

    The process group must exist. Gradients are summed over ranks, not averaged: the weights of a loss are those of the
    whole mini-batch.
    """

    def __init__(self, world: World) -> None:
        # checkpoints are written in the background, beside collectives of the training step, so they need another group
        super().__init__(world, save_group=dist.new_group(backend="gloo"))
        self._mesh = init_device_mesh(torch.device(world.device).type, (world.size,))

    def _wrap(self, module: ScoringModule) -> ScoringModule:
        for block in [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]:
            fully_shard(block, mesh=self._mesh)
        fully_shard(module, mesh=self._mesh)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        return module

    def is_finite(self, module: ScoringModule) -> bool:
        local = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
        flag = torch.stack([tensor.isfinite().all() for tensor in local]).all().to(torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def export(self, module: ScoringModule, folder: Path) -> None:
        tensors = {name: tensor.cpu() for name, tensor in self.full_tensors(module)}
        if self.world.rank == 0:
            hf_model(module).save_pretrained(folder, state_dict=tensors)
        dist.barrier()
