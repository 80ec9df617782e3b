"""Strategies for Hugging Face models: every rank has all modules, with the whole or a shard of each parameter."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.distributed.strategy import (
    Consume,
    DistributedStrategy,
    Pass,
    TrainState,
    gather,
    local_part,
    new_save_group,
    set_timeout,
)
from skyrl_train.errors import ConfigError
from skyrl_train.media.processing import has_vision
from skyrl_train.models.deferred import deferring
from skyrl_train.models.generation import save_model
from skyrl_train.models.loading import autocast, checkpointed_layers, set_train_dtype
from skyrl_train.models.lora import (
    Gather,
    adapter_config,
    adapter_disabled,
    adapter_dropout,
    add_adapter,
    merged_buffers,
    merged_names,
)
from skyrl_train.models.offload import activations_in_host_memory
from skyrl_train.models.prefix_sharing import use_attention
from skyrl_train.models.quantization import quantize_base
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.models.sequence_parallel import SequenceGroup
from skyrl_train.models.vision import freeze_vision
from skyrl_train.threads import adjust_threads
from skyrl_train.types import Shard
from skyrl_train.types.specs import ModelSpec, World
from skyrl_train.watchdog import RANK

T = TypeVar("T")


class HuggingFaceStrategy(DistributedStrategy[ScoringModule]):
    """Base class of strategies for Hugging Face models, with or without an adapter."""

    def build(self, spec: ModelSpec, *, entropy_grad: bool) -> ScoringModule:
        if spec.activation_offload and spec.optimizer is not None and self.world.device == "cpu":
            raise ConfigError(
                "trainer.activation_offload=true moves activations from a GPU to host memory, but this run uses the "
                "CPU; set trainer.activation_offload=false"
            )
        is_quantized = spec.lora is not None and spec.lora.config.is_quantized
        with deferring(self.world.size > 1 or is_quantized) as weights:
            model = spec.load()
        dtypes = {}
        if spec.trains_all_weights:
            train_dtype = getattr(torch, spec.train_dtype)
            dtypes = set_train_dtype(model, train_dtype, is_empty=weights.source is not None)
        if spec.lora is not None:
            if is_quantized:
                quantize_base(model, spec.lora.key, torch.device(self.world.device), weights)
            add_adapter(model, spec.lora)
        elif has_vision(model.config) and not spec.trains_vision:
            freeze_vision(model)
        module = ScoringModule(
            model,
            temperature=spec.temperature,
            entropy_grad=entropy_grad,
            is_critic=spec.role in ("critic", "reward"),
            sequence_group=self._sequence_group(spec),
            replays_experts=spec.replays_experts,
        )
        module.export_dtypes = dtypes
        module = self._wrap(module, spec)
        if weights.source is not None and not is_quantized:
            continues = spec.lora is not None and spec.lora.config.lora_path is not None
            for name, parameter in merged_names(module.hf_model):
                # The adapter in lora_path includes the trained head, so the head is not read from the base.
                if not (continues and parameter.requires_grad):
                    weights.read(name, *local_part(parameter.detach()), dtypes.get(name))
        module.probe(weights.source)
        _reshard(module)
        return module

    def run(self, module: ScoringModule, shard: Shard, consume: Consume[T], settings: Pass) -> list[T]:
        device = torch.device(self.world.device)
        results: list[T] = []
        for indices in shard.micro_batches:
            adjust_threads()
            RANK.progress()
            rows = shard.rows.select(indices).to(device)
            if not settings.adapter:  # the reference chooses its own experts, whether or not it is the policy's model
                rows = replace(rows, experts=None)
            if not settings.backward:
                without_adapter = nullcontext() if settings.adapter else adapter_disabled(module.hf_model)
                with torch.no_grad(), autocast(device, settings.bf16), without_adapter:
                    results.append(consume(module(rows), rows)[1])
                continue
            recomputed = use_attention(module.hf_model) if module.can_share(rows) else nullcontext()
            dropped = adapter_dropout(module.hf_model) if settings.dropout else nullcontext()
            offloaded = activations_in_host_memory(module) if settings.activation_offload else nullcontext()
            with checkpointed_layers(module.hf_model), recomputed, dropped:
                with autocast(device, settings.bf16), offloaded:
                    scores = module(rows)
                loss, result = consume(scores, rows)
                assert loss is not None
                loss.backward()
            results.append(result)
        _reshard(module)
        return results

    def _state_dict(self, state: TrainState[ScoringModule], *, with_moments: bool) -> dict[str, Any]:
        module = state.module
        saved: dict[str, Any] = {"model": get_model_state_dict(module, options=_model_options(module))}
        if adapter_config(module.hf_model) is not None:  # torch does not drop the second name of frozen tied weights
            trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
            saved["model"] = {name: tensor for name, tensor in saved["model"].items() if name in trained}
        if state.host_weights is not None:  # tied weights have two names
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if name in saved["model"]:
                    saved["model"][name] = state.updated_tensor(parameter).detach()
        if with_moments:
            saved["optimizer"] = optimizer_state_dict(state)
        return saved

    def _load_state_dict(self, state: TrainState[ScoringModule], saved: dict[str, Any]) -> None:
        # Moments and master weights are loaded in place.
        set_model_state_dict(state.module, saved["model"], options=_model_options(state.module))

    def gather_from(self, module: ScoringModule) -> Gather:
        return gather

    @torch.no_grad()
    def load_tensors(self, module: ScoringModule, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(module.hf_model.named_parameters())
        for name, tensor in tensors:
            parameter = parameters[name]
            if isinstance(parameter, DTensor):  # every rank has the whole tensor and keeps its slice
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(tensor)

    def clip_gradients(self, state: TrainState[ScoringModule], max_norm: float) -> float:
        assert state.optimizer is not None
        if state.host_weights is not None:
            state.host_weights.finish_gradients()
        return gather(torch.nn.utils.clip_grad_norm_(state.optimizer.parameters, max_norm)).item()

    def _sequence_group(self, spec: ModelSpec) -> SequenceGroup | None:
        """Return the ranks that split a row's tokens with this rank, or None if it computes whole rows."""
        return None

    def _wrap(self, module: ScoringModule, spec: ModelSpec) -> ScoringModule:
        """Shard a module's parameters across the ranks. The default keeps it whole."""
        return module


class SingleStrategy(HuggingFaceStrategy):
    """A strategy that keeps the whole model on one device."""

    def export(self, module: ScoringModule, folder: Path) -> None:
        model = module.hf_model
        differs = adapter_config(model) is not None or module.export_dtypes
        save_model(model, folder, dict(self.full_tensors(module)) | merged_buffers(model) if differs else None)


class FSDP2Strategy(HuggingFaceStrategy):
    """Fully sharded data parallelism: every rank holds a slice of each parameter, and gathers one block at a time.

    The blocks are the transformer blocks and the root: embeddings, final norm and head. The process group must exist.
    Gradients are summed over ranks, not averaged, because the loss weights of each rank are already divided by the
    counts of the whole mini-batch.
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
        if spec.train_dtype == "bfloat16" and spec.trains_all_weights:
            head = getattr(module.hf_model, "score", None)  # float32, and a group of FSDP2 has one dtype
            wide = [name for name, p in module.hf_model.named_parameters() if p.dtype != torch.bfloat16]
            if wide := [name for name in wide if not name.startswith("score.")]:
                raise ConfigError(
                    f"{spec.section}.model.train_dtype=bfloat16: a {type(module.hf_model).__name__} keeps {wide[0]} in "
                    f"float32, and FSDP2 needs one dtype; set {spec.section}.model.train_dtype=float32, or use one rank"
                )
            if head is not None:
                fully_shard(head, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), **options)
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


def optimizer_state_dict(state: TrainState[ScoringModule]) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, in the format of PyTorch's `flatten_optimizer_state_dict`."""
    optimizer = state.optimizer
    assert optimizer is not None
    optimizer.init_state()
    (group,) = optimizer.param_groups
    saved: dict[str, Any] = {}
    for name, parameter in state.module.named_parameters():
        if parameter.requires_grad:
            values = optimizer.state[state.updated_tensor(parameter)]
            saved |= {f"state.{name}.{key}": value for key, value in values.items()}
            saved |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return saved


def _model_options(module: ScoringModule) -> StateDictOptions:
    """Return the options for a model's state dict. With an adapter, it has only the trained parameters."""
    has_adapter = adapter_config(module.hf_model) is not None
    return StateDictOptions(ignore_frozen_params=has_adapter, strict=not has_adapter)


def _reshard(module: ScoringModule) -> None:
    """Free gathered parameters. A forward pass without a backward pass may leave parameters gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
