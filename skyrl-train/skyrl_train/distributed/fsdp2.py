"""Fully sharded data parallelism: every rank holds a slice of each parameter and gathers one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.distributed.strategy import LocalCompute, TrainState, hf_model
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types import Scores, TrainingBatch
from skyrl_train.types.specs import ModelSpec, TensorSpec, World

T = TypeVar("T")


class FSDP2Strategy(LocalCompute):
    """Shards each transformer block and, as the root, what is left: embeddings, final norm and head.

    The process group must exist. Losses are sums whose weights belong to the whole mini-batch, so gradients are summed
    over ranks, not averaged.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        device = torch.device(world.device)
        self._mesh: DeviceMesh = init_device_mesh(device.type, (world.size,))
        # Saving runs in the background, beside collectives of the training step: it needs a group of its own.
        self._save_group = dist.new_group(backend="gloo")

    def build(self, spec: ModelSpec, *, entropy_grad: bool) -> ScoringModule:
        """See `DistributedStrategy.build`."""
        is_critic = spec.role == "critic"
        module = ScoringModule(
            spec.load(), temperature=spec.temperature, entropy_grad=entropy_grad, is_critic=is_critic
        )
        for block in [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]:
            fully_shard(block, mesh=self._mesh)
        fully_shard(module, mesh=self._mesh)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        return module

    def run(
        self,
        module: ScoringModule,
        micro_batches: Sequence[TrainingBatch],
        consume: Callable[[Scores, TrainingBatch], tuple[torch.Tensor | None, T]],
        *,
        bf16: bool,
        backward: bool,
    ) -> list[T]:
        """See `DistributedStrategy.run`."""
        results = super().run(module, micro_batches, consume, bf16=bf16, backward=backward)
        assert isinstance(module, FSDPModule)
        module.reshard()  # a forward pass without a backward pass leaves the root gathered
        return results

    def clip_gradients(self, module: ScoringModule, max_norm: float) -> float:
        """See `DistributedStrategy.clip_gradients`."""
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def is_finite(self, module: ScoringModule) -> bool:
        """See `DistributedStrategy.is_finite`."""
        finite = [_local(parameter).isfinite().all() for parameter in module.parameters()]
        flag = torch.stack(finite).all().to(torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def tensor_specs(self, module: ScoringModule) -> list[TensorSpec]:
        """See `DistributedStrategy.tensor_specs`."""
        return [TensorSpec(name, tuple(p.shape), p.dtype) for name, p in hf_model(module).named_parameters()]

    def full_tensors(self, module: ScoringModule) -> Iterator[tuple[str, torch.Tensor]]:
        """See `DistributedStrategy.full_tensors`."""
        for name, parameter in hf_model(module).named_parameters():
            tensor = parameter.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def load_tensors(self, module: ScoringModule, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `DistributedStrategy.load_tensors`. Every rank has the whole tensors, and keeps its slices."""
        own = dict(hf_model(module).named_parameters())
        for name, tensor in tensors:
            parameter = own[name]
            assert isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(tensor, self._mesh, parameter.placements, src_data_rank=None))

    def save(self, state: TrainState, folder: Path) -> Future[Any]:
        """See `DistributedStrategy.save`."""
        return self._save(state, folder, self._save_group)

    def load(self, state: TrainState, folder: Path) -> None:
        """See `DistributedStrategy.load`."""
        self._load(state, folder, self._save_group)

    def export(self, module: ScoringModule, folder: Path) -> None:
        """See `DistributedStrategy.export`. Rank 0 writes."""
        model = hf_model(module)
        tensors = {name: tensor.cpu() for name, tensor in self.full_tensors(module)}
        if self.world.rank == 0:
            model.save_pretrained(folder, state_dict=tensors)
        dist.barrier()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
