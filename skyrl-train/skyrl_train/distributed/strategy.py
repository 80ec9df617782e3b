"""The interface of strategies that spread a model over ranks, and the work that they share."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from skyrl_train.models.deferred import deferring
from skyrl_train.models.loading import autocast, checkpointed_layers
from skyrl_train.models.lora import (
    adapter_config,
    adapter_disabled,
    add_adapter,
    change_norm,
    merged_names,
    merged_tensors,
    save_adapter,
    trained_parameters,
)
from skyrl_train.models.prefix_sharing import tree_attention
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.models.sequence_parallel import SequenceGroup
from skyrl_train.threads import adjust_threads
from skyrl_train.types import Scores, TrainingBatch
from skyrl_train.types.specs import LoraSpec, ModelSpec, SyncKind, TensorSpec, World

T = TypeVar("T")

# torch warns when a single process saves without a process group
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

OPTIMIZER_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
SCHEDULE = "schedule.pt"

METADATA = ".metadata"
"""File that DCP writes once every rank has written its part."""


@dataclass(slots=True)
class TrainState:
    """The state of a model that changes in a run, except random generators."""

    module: ScoringModule
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None


class _Writer(dcp.FileSystemWriter):
    """A writer of a rank's part that calls a function first. If the function fails, the save fails on all ranks."""

    def __init__(self, folder: Path, write_files: Callable[[], None]) -> None:
        super().__init__(folder)
        self._write_files = write_files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self._write_files()
        return super().write_data(plan, planner)


class DistributedStrategy(ABC):
    """The distribution of one model over the ranks of a world. All ranks make the same calls in the same order."""

    def __init__(self, world: World, save_group: dist.ProcessGroup | None = None) -> None:
        """Set the process group for writing and reading checkpoints, `save_group`; None for a single rank."""
        self.world = world
        self._save_group = save_group

    def build(self, spec: ModelSpec, *, entropy_grad: bool) -> ScoringModule:
        """Load the model of `spec` and spread it; `entropy_grad` makes its entropies differentiable."""
        is_critic = spec.role in ("critic", "reward")
        with deferring(self.world.size > 1) as weights:
            model = spec.load()
        if spec.lora is not None:
            add_adapter(model, spec.lora)
        module = ScoringModule(
            model,
            temperature=spec.temperature,
            entropy_grad=entropy_grad,
            is_critic=is_critic,
            sequence_group=self._sequence_group(spec),
        )
        module = self._wrap(module, spec)
        if weights.source is not None:
            for name, parameter in merged_names(hf_model(module)):
                weights.read(name, *_local_part(parameter.detach()))
        module.probe(weights.source)
        _reshard(module)
        return module

    def run(
        self,
        module: ScoringModule,
        micro_batches: Sequence[TrainingBatch],
        consume: Callable[[Scores, TrainingBatch], tuple[torch.Tensor | None, T]],
        *,
        bf16: bool,
        backward: bool,
        adapter: bool = True,
    ) -> list[T]:
        """Score every micro-batch and call `consume`, which returns the loss to differentiate if `backward` is set.

        Gradients are summed over micro-batches and ranks. Without `adapter`, the model computes without its adapter.
        """
        device = torch.device(self.world.device)
        results: list[T] = []
        for micro_batch in micro_batches:
            adjust_threads()
            rows = micro_batch.to(device)
            if not backward:
                without_adapter = nullcontext() if adapter else adapter_disabled(hf_model(module))
                with torch.no_grad(), autocast(device, bf16), without_adapter:
                    results.append(consume(module.score(rows), rows)[1])
                continue
            recomputed = tree_attention(hf_model(module)) if module.shares_prefixes else nullcontext()
            with checkpointed_layers(hf_model(module)), recomputed:
                with autocast(device, bf16):
                    scores = module.score(rows)
                loss, result = consume(scores, rows)
                assert loss is not None
                loss.backward()
            results.append(result)
        _reshard(module)
        return results

    def copy(self, state: TrainState) -> dict[str, Any]:
        """Copy the state to host memory, by parameter name."""
        saved: dict[str, Any] = {"model": get_model_state_dict(state.module, options=_model_options(state.module))}
        if state.optimizer is not None and state.optimizer.state:  # the first step creates the moments
            saved["optimizer"] = get_optimizer_state_dict(state.module, state.optimizer, options=OPTIMIZER_OPTIONS)
        options = StagingOptions(False, False, False, False)  # one copy, which is complete when the call returns
        copied = DefaultStager(options).stage(saved)
        assert isinstance(copied, dict)
        return copied

    def write(self, copied: dict[str, Any], folder: Path, write_files: Callable[[], None]) -> None:
        """Write a copy of the state, after this rank's other files. `METADATA` completes the folder.

        Raises:
            CheckpointException: a rank could not write its part; on all ranks.
        """
        torch.serialization.set_crc32_options(False)  # it takes longer than writing, and checksums.json covers the file
        group = self._save_group
        dcp.save(copied, storage_writer=_Writer(folder, write_files), process_group=group, no_dist=group is None)

    def load(self, state: TrainState, folder: Path) -> None:
        """Load what any number of ranks saved, in place: an engine may generate with these very tensors."""
        options = _model_options(state.module)
        saved: dict[str, Any] = {"model": get_model_state_dict(state.module, options=options)}
        names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        has_moments = any(name.startswith("optimizer.") for name in names)
        if state.optimizer is not None and has_moments:
            saved["optimizer"] = get_optimizer_state_dict(state.module, state.optimizer, options=OPTIMIZER_OPTIONS)
        group = self._save_group
        dcp.load(saved, checkpoint_id=folder, process_group=group, no_dist=group is None)
        set_model_state_dict(state.module, saved["model"], options=options)
        if state.optimizer is not None and has_moments:
            set_optimizer_state_dict(state.module, state.optimizer, saved["optimizer"], options=OPTIMIZER_OPTIONS)
        if state.scheduler is not None:
            state.scheduler.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))

    def tensor_specs(self, module: ScoringModule, kind: SyncKind = "full") -> list[TensorSpec]:
        """Return the tensors of the model or of its adapter, in the order of `full_tensors`."""
        model = hf_model(module)
        named = merged_names(model) if kind == "full" else trained_parameters(model).items()
        return [TensorSpec(name, tuple(p.shape), p.dtype) for name, p in named]

    def full_tensors(self, module: ScoringModule, kind: SyncKind = "full") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the model under its Hugging Face name, with the adapter merged into it, or every tensor
        of the adapter. Each is gathered on every rank.
        """
        if kind == "full":
            yield from merged_tensors(hf_model(module), _gather)
        else:
            for name, parameter in trained_parameters(hf_model(module)).items():
                yield name, _gather(parameter.detach())

    def frozen_tensors(self, module: ScoringModule) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every frozen tensor of a model with an adapter, gathered on every rank."""
        for name, parameter in merged_names(hf_model(module)):
            if not parameter.requires_grad:
                yield name, _gather(parameter.detach())

    def adapter_norm(self, module: ScoringModule) -> float:
        """Return the Frobenius norm of the change that the adapter makes to the weights."""
        return change_norm(hf_model(module), _gather)

    def copy_adapter(self, module: ScoringModule) -> dict[str, torch.Tensor]:
        """Copy the tensors of the adapter to host memory. Gathering them is collective."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.full_tensors(module, "adapter")}

    def export_adapter(self, module: ScoringModule, lora: LoraSpec, folder: Path) -> None:
        """Write the adapter in peft's format."""
        tensors = self.copy_adapter(module)
        if self.world.rank == 0:
            save_adapter(hf_model(module), tensors, lora.base_path, folder)

    @torch.no_grad()
    def load_tensors(self, module: ScoringModule, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors, named as in `full_tensors`, into the model."""
        parameters = dict(hf_model(module).named_parameters())
        for name, tensor in tensors:
            parameter = parameters[name]
            if isinstance(parameter, DTensor):  # every rank has the whole tensor and keeps its slice
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(tensor)

    def clip_gradients(self, module: ScoringModule, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most `max_norm`; return the norm before, which may be NaN."""
        return _gather(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)).item()

    def _sequence_group(self, spec: ModelSpec) -> SequenceGroup | None:
        """Return the ranks that divide the tokens of a row with this one; None if this rank computes whole rows."""
        return None

    @abstractmethod
    def _wrap(self, module: ScoringModule, spec: ModelSpec) -> ScoringModule:
        """Spread the parameters of a module over the ranks."""

    @abstractmethod
    def is_finite(self, module: ScoringModule) -> bool:
        """Return True on every rank if no parameter on any rank is NaN or infinite."""

    @abstractmethod
    def export(self, module: ScoringModule, folder: Path) -> None:
        """Write a plain Hugging Face folder."""


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return False if an element is NaN or infinite. Minimum and maximum take a seventh of the time of `isfinite`."""
    return all(bool(torch.stack(torch.aminmax(tensor)).isfinite().all()) for tensor in tensors if tensor.numel())


def hf_model(module: ScoringModule) -> PreTrainedModel:
    """Return the Hugging Face model of a scoring module."""
    model = module.model
    assert isinstance(model, PreTrainedModel)
    return model


def _model_options(module: ScoringModule) -> StateDictOptions:
    """Return the options for the state of a model: with an adapter, only what is trained."""
    has_adapter = adapter_config(hf_model(module)) is not None
    return StateDictOptions(ignore_frozen_params=has_adapter, strict=not has_adapter)


def _reshard(module: ScoringModule) -> None:
    """Free what a forward pass without a backward pass leaves gathered: the root, and perhaps the blocks."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
    """Return the part of a tensor that this rank holds, and its offset."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
