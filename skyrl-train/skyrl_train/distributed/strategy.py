"""Interface of strategies that shard a model over ranks, and their common work."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.lr_scheduler import LambdaLR

from skyrl_train.config.policy import OptimizerName
from skyrl_train.models.deferred import is_finite
from skyrl_train.models.generation import save_model
from skyrl_train.models.lora import Gather, merged_buffers, merged_names, sync_tensors
from skyrl_train.models.offload import release_cached_memory
from skyrl_train.models.scoring_module import Scorer
from skyrl_train.optimizers import AdamW, HostWeights
from skyrl_train.types import Shard, TrainingBatch
from skyrl_train.types.specs import ModelSpec, SyncKind, TensorSpec, World

M = TypeVar("M", bound=Scorer)
T = TypeVar("T")

# Torch warns when a single process saves without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

SCHEDULE = "schedule.pt"

METADATA = ".metadata"
"""File that DCP writes once every rank has written its part."""

BASE_MODEL = "base_model.txt"
"""File with the path of the model that a run started from. Adapters store their base's path themselves."""

SAVE_TIMEOUT = timedelta(days=1)
"""Maximum time that ranks wait for each other's disks during a save, while training continues."""


@dataclass(slots=True)
class TrainState(Generic[M]):
    """The state of a model that training changes, except random generators."""

    module: M
    optimizer: AdamW | None = None
    scheduler: LambdaLR | None = None
    host_weights: HostWeights | None = None
    """With `cpu_offload`: the master weights that the optimizer updates."""

    def updated_tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the optimizer updates for a parameter: its master copy or itself."""
        masters = {} if self.host_weights is None else self.host_weights.masters
        return masters.get(parameter, parameter)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Pass:
    """Settings of a pass over micro-batches."""

    bf16: bool  # compute in bfloat16 on a GPU
    backward: bool = False  # differentiate the loss
    adapter: bool = True  # False: compute without the adapter
    dropout: bool = False  # apply the adapter's dropout
    activation_offload: bool = False  # keep activations for the backward pass in host memory


Consume = Callable[[Any, TrainingBatch], tuple[torch.Tensor | None, T]]
"""Takes the scores and the rows of a micro-batch. Returns the loss (None without a backward pass) and a result."""


class _RankWriter(dcp.FileSystemWriter):
    """Writes a rank's part of a checkpoint after `write_files`. If that fails, the save fails on all ranks."""

    def __init__(self, folder: Path, write_files: Callable[[], None]) -> None:
        super().__init__(folder)
        self._write_files = write_files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self._write_files()
        return super().write_data(plan, planner)


class _CompletePlanner(dcp.DefaultLoadPlanner):
    """A load planner that fails on all ranks if the checkpoint has weights that no rank loads."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        loaded = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        assert self.metadata is not None
        saved = [name for name in self.metadata.state_dict_metadata if name.startswith("model.")]
        if unused := [name for name in saved if name not in loaded]:
            raise ValueError(
                f"the model lacks {len(unused)} of its {len(saved)} tensors, among them "
                f"{unused[0].removeprefix('model.model.')}; for an adapter, set the lora.target_modules and "
                "lora.exclude_modules of the run that saved it"
            )
        return super().create_global_plan(global_plan)


class DistributedStrategy(ABC, Generic[M]):
    """Base class for distributing one model over the ranks of a world. All ranks make the same calls in order."""

    def __init__(self, world: World, save_group: dist.ProcessGroup | None = None) -> None:
        """Use `save_group` to write and read checkpoints, None for a single rank."""
        self.world = world
        self._save_group = save_group

    @abstractmethod
    def build(self, spec: ModelSpec, *, entropy_grad: bool) -> M:
        """Load the model of `spec` and shard it. `entropy_grad` makes its entropies differentiable."""

    @abstractmethod
    def run(self, module: M, shard: Shard, consume: Consume[T], settings: Pass) -> list[T]:
        """Score every micro-batch of a shard and pass the scores to `consume`.

        `consume` returns a loss and a result. Gradients are summed over micro-batches here, and over ranks here or in
        `clip_gradients`. Return the results, or an empty list on a rank without scores.
        """

    @abstractmethod
    def clip_gradients(self, state: TrainState[M], max_norm: float) -> float:
        """Complete the gradients, and scale them down to a global norm of `max_norm` if it is larger.

        Call it once per step. Returns the norm before scaling. It may be NaN.
        """

    @abstractmethod
    def gather_from(self, module: M) -> Gather:
        """Return a function that gathers a parameter of the module's Hugging Face model. Its calls are collective."""

    @abstractmethod
    def load_tensors(self, module: M, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors, with names as in `full_tensors`, into the model."""

    @abstractmethod
    def _state_dict(self, state: TrainState[M], *, with_moments: bool) -> dict[str, Any]:
        """Return the weights under `model` and, with `with_moments`, the optimizer state under `optimizer`.

        Both are by parameter name. Tensors may share memory with the state.
        """

    @abstractmethod
    def _load_state_dict(self, state: TrainState[M], saved: dict[str, Any]) -> None:
        """Copy a state dict of the same form into the state, in place because an engine may use the same tensors."""

    @property
    def random_stream(self) -> int:
        """Rank whose random numbers this rank draws. Tensor-parallel ranks must drop the same inputs of an adapter."""
        return self.world.rank

    def is_finite(self, module: M) -> bool:
        """Return True on every rank if no parameter is NaN or infinite."""
        return self.all_true(all(is_finite(local_part(parameter.detach())[0]) for parameter in module.parameters()))

    def all_true(self, value: bool) -> bool:
        """Return True on every rank if `value` is True on all ranks. Collective."""
        if self.world.size == 1:
            return value
        flag = torch.tensor(value, device=torch.device(self.world.device), dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def tensor_specs(self, module: M, kind: SyncKind = "full") -> list[TensorSpec]:
        """Return the tensors of a weight sync, in the order of `full_tensors`."""
        model, dtypes = module.hf_model, module.export_dtypes
        named = merged_names(model) if kind == "full" else sync_tensors(model, kind, lambda shard: shard.detach())
        return [TensorSpec(name, tuple(tensor.shape), dtypes.get(name, tensor.dtype)) for name, tensor in named]

    def full_tensors(
        self, module: M, kind: SyncKind = "full", *, as_exported: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a weight sync one by one, gathered on every rank, under Hugging Face names.

        Every rank must iterate to the end, because each step is collective. A weight of shape (8, 4) on 4 FSDP ranks is
        a DTensor with shards of (2, 4). Its step all-gathers them and yields (8, 4). No rank ever holds more than one
        gathered tensor, unless it keeps what it gets. `as_exported` rounds to the dtype of exports, otherwise tensors
        keep the training dtype.
        """
        dtypes = module.export_dtypes if as_exported else {}
        for name, tensor in sync_tensors(module.hf_model, kind, self.gather_from(module)):
            yield name, tensor.to(dtypes.get(name, tensor.dtype))

    def copy_adapter(self, module: M) -> dict[str, torch.Tensor]:
        """Copy the tensors of the adapter to host memory. Gathering them is collective."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.full_tensors(module, "adapter")}

    def copy(self, state: TrainState[M]) -> dict[str, Any]:
        """Copy the state to host memory, by parameter name."""
        release_cached_memory(torch.device(self.world.device))  # large tensors do not fit the gaps of freed ones
        has_moments = state.optimizer is not None and bool(state.optimizer.state)  # the first step creates moments
        options = StagingOptions(False, False, False, False)  # synchronous: the copy is complete when stage() returns
        copied = DefaultStager(options).stage(self._state_dict(state, with_moments=has_moments))
        assert isinstance(copied, dict)
        return copied

    def write(self, copied: dict[str, Any], folder: Path, write_files: Callable[[], None]) -> None:
        """Write a copy of the state after this rank's other files. DCP writes `METADATA` last.

        Raises:
            CheckpointException: on all ranks, if a rank could not write its part.
        """
        torch.serialization.set_crc32_options(False)  # slower than writing, and checksums.json covers the file
        group = self._save_group
        dcp.save(copied, storage_writer=_RankWriter(folder, write_files), process_group=group, no_dist=group is None)

    def load(self, state: TrainState[M], folder: Path) -> None:
        """Load a checkpoint that any number of ranks saved, in any layout. The optimizer keeps its configured settings.

        Raises:
            CheckpointException: on all ranks, if a rank could not read its part or the model has other tensors.
        """
        names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        has_moments = state.optimizer is not None and any(name.startswith("optimizer.") for name in names)
        saved = self._state_dict(state, with_moments=has_moments)
        check_same_state(saved, names)
        group = self._save_group
        planner = _CompletePlanner()
        groups = [] if state.optimizer is None else state.optimizer.param_groups
        configured = [{name: value for name, value in part.items() if name != "params"} for part in groups]
        dcp.load(saved, checkpoint_id=folder, planner=planner, process_group=group, no_dist=group is None)
        self._load_state_dict(state, saved)
        if state.scheduler is not None:
            state.scheduler.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))
        for i, settings in enumerate(configured):
            assert state.optimizer is not None
            state.optimizer.param_groups[i].update(settings)
            if state.scheduler is not None:
                state.scheduler.base_lrs[i] = settings["initial_lr"]

    def export(self, module: M, folder: Path) -> None:
        """Write a plain Hugging Face folder. Only rank 0 writes, and no rank waits for its disk."""
        tensors = {}
        for name, tensor in self.full_tensors(module):  # gathered one by one, and only rank 0 keeps them
            if self.world.rank == 0:
                tensors[name] = tensor.cpu()
        if self.world.rank == 0:
            save_model(module.hf_model, folder, tensors | merged_buffers(module.hf_model))


def check_same_state(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint has moments of another optimizer, or wider weights than training has.

    `saved` describes the tensors of the checkpoint by name, and `state` those to load. Rounding float32 weights to
    bfloat16 would change the model, but bfloat16 weights fit exactly into float32 weights.
    """
    ours = {name.rpartition(".")[2] for name in state.get("optimizer", {}) if name.startswith("state.")}
    theirs = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.state.")}
    if ours and (name := optimizer_name(ours)) != (saved_name := optimizer_name(theirs)):
        raise ValueError(
            f"its optimizer state is for optimizer_config.name={saved_name}, but this run has name={name}; set "
            f"optimizer_config.name={saved_name}, or start a new run from an export"
        )
    for name, tensor in state["model"].items():
        description = saved.get(f"model.{name}")
        dtype = getattr(getattr(description, "properties", None), "dtype", tensor.dtype)
        if dtype == torch.float32 and tensor.dtype == torch.bfloat16:
            raise ValueError(
                "its trained weights are float32, but this run has model.train_dtype=bfloat16, which would round them; "
                "set model.train_dtype=float32, or start a new run from an export"
            )


def optimizer_name(tensors: Collection[str]) -> OptimizerName:
    """Return the optimizer whose state has tensors of these names."""
    if "momentum_buffer" in tensors:
        return "muon"
    return "adamw_8bit" if "exp_avg_codes" in tensors else "adamw"


def new_save_group() -> dist.ProcessGroup:
    """Return a second group of all ranks, to write checkpoints while the first group runs the training step."""
    group = dist.new_group(backend="gloo")
    _set_pg_timeout(SAVE_TIMEOUT, group)
    return group


def set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Limit how long ranks wait for each other in a mesh's collectives. Torch creates its groups with other limits."""
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
    """Return this rank's part of a tensor, and the offset of the part in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, detached, on every rank that holds a part of it. Collective for a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
