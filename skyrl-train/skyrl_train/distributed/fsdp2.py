"""Fully sharded data parallelism: every rank holds a slice of each parameter and gathers one block at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.distributed.strategy import DistributedStrategy, hf_model
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types.specs import World


class FSDP2Strategy(DistributedStrategy):
    """Shards each transformer block and, as the root, what is left: embeddings, final norm and head.

    The process group must exist. Losses are sums whose weights belong to the whole mini-batch, so gradients are summed
    over ranks, not averaged.
    """

    def __init__(self, world: World) -> None:
        # Checkpoints are written in the background, beside collectives of the training step: in a group of their own.
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

    def _release_gathered(self, module: ScoringModule) -> None:
        """A forward pass without a backward pass leaves the root gathered."""
        assert isinstance(module, FSDPModule)
        module.reshard()

    def clip_gradients(self, module: ScoringModule, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def is_finite(self, module: ScoringModule) -> bool:
        finite = [_local(parameter).isfinite().all() for parameter in module.parameters()]
        flag = torch.stack(finite).all().to(torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def full_tensors(self, module: ScoringModule) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in hf_model(module).named_parameters():
            tensor = parameter.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def load_tensors(self, module: ScoringModule, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Every rank has the whole tensors, and keeps its slices."""
        own = dict(hf_model(module).named_parameters())
        for name, tensor in tensors:
            parameter = own[name]
            assert isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(tensor, self._mesh, parameter.placements, src_data_rank=None))

    def export(self, module: ScoringModule, folder: Path) -> None:
        """Rank 0 writes."""
        tensors = {name: tensor.cpu() for name, tensor in self.full_tensors(module)}
        if self.world.rank == 0:
            hf_model(module).save_pretrained(folder, state_dict=tensors)
        dist.barrier()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
