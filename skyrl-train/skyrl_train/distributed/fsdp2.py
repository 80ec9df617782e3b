"""Fully sharded data parallelism: every rank holds a slice of each parameter, and gathers one block at a time."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.distributed.hugging_face import HuggingFaceStrategy
from skyrl_train.distributed.strategy import new_save_group, set_timeout
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.models.sequence_parallel import SequenceGroup
from skyrl_train.types.specs import ModelSpec, World


class FSDP2Strategy(HuggingFaceStrategy):
    """A strategy that shards each transformer block, and the rest (embeddings, final norm, head) as the root.

    The process group must exist. Gradients are summed over ranks, not averaged, because the loss weights of each rank
    are already divided by the counts of the whole mini-batch.
    """

    def __init__(self, world: World, timeout: timedelta) -> None:
        """Limit the time that ranks wait for each other in a collective to `timeout`."""
        super().__init__(world, save_group=new_save_group())
        self._device = torch.device(world.device)
        self._timeout = timeout
        self._sequence_groups: dict[int, dist.ProcessGroup] = {}  # this rank's groups, by size

    def _wrap(self, module: ScoringModule, spec: ModelSpec) -> ScoringModule:
        on_gpu, fsdp = self._device.type == "cuda", spec.fsdp
        dtype = getattr(torch, fsdp.param_dtype) if fsdp.param_dtype != "auto" else None
        if fsdp.param_dtype == "auto" and on_gpu and spec.bf16:
            dtype = torch.bfloat16
        options: dict[str, Any] = {"mesh": self._mesh(fsdp.fsdp_size)}
        if fsdp.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        blocks = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
        for block in blocks:
            fully_shard(
                block,
                reshard_after_forward=fsdp.reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
                **options,
            )
        # The head stays in float32: with bfloat16 weights, logits and values would move by more than an update moves.
        fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), **options)
        register_fsdp_forward_method(module, "probe")
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
        return module

    def _sequence_group(self, spec: ModelSpec) -> SequenceGroup | None:
        size = spec.sequence_parallel_size
        if size == 1:
            return None
        if size not in self._sequence_groups:  # a policy and a critic of the same size share the group
            self._sequence_groups[size], _ = dist.new_subgroups(size, timeout=self._timeout)
        return SequenceGroup(self._sequence_groups[size], f"{spec.section}.sequence_parallel_size")

    def _mesh(self, fsdp_size: int) -> DeviceMesh:
        """Return the mesh of all ranks, in groups of `fsdp_size`. Each group holds one copy of the weights."""
        if fsdp_size in (-1, self.world.size):
            return init_device_mesh(self._device.type, (self.world.size,))
        shape = (self.world.size // fsdp_size, fsdp_size)
        mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("copies", "shards"))
        set_timeout(mesh, self._timeout)
        return mesh
