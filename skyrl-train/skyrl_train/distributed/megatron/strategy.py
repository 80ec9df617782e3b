"""Tensor, pipeline and context parallelism with Megatron-Core: matrices, layers and tokens are sharded over ranks.

Data-parallel copies of such a group of ranks get different rows.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedDim
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.distributed.megatron.lora import check_adapter
from skyrl_train.distributed.megatron.model import MegatronScorer, check_model, transformer_config
from skyrl_train.distributed.megatron.names import EMBEDDINGS, HEAD, HEAD_PARAMETER, Part
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
from skyrl_train.models.deferred import deferring
from skyrl_train.models.loading import autocast, set_train_dtype
from skyrl_train.models.lora import Gather, adapter_disabled, adapter_dropout, add_adapter
from skyrl_train.optimizers.adamw import MOMENTS
from skyrl_train.threads import adjust_threads
from skyrl_train.types import Scores, Shard, TrainingBatch
from skyrl_train.types.specs import Layout, LoraSpec, ModelSpec, SyncKind, World
from skyrl_train.watchdog import RANK

T = TypeVar("T")


class _OnCPU(TorchFunctionMode):
    """Create tensors for the device "cuda" on the CPU, and make `Tensor.cuda` a no-op."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Run Megatron-Core on `device`.

    Its modules, collectives and schedules allocate buffers on `torch.cuda.current_device()` or "cuda". If `device` is a
    CPU, both mean the CPU inside this context.
    """
    if device.type == "cuda":
        yield
        return
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _OnCPU():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize


def configure(
    model: PreTrainedModel, source: str, parallel: MegatronConfig, section: str, lora: LoraSpec | None
) -> TransformerConfig:
    """Add the adapter to a model, with or without weights, and return the model's Megatron-Core configuration.

    Error messages call the model `source`. `section` is the key of its settings, e.g. trainer.policy. Raise ConfigError
    if Megatron-Core cannot compute the model or its adapter, or if the sizes do not divide them.
    """
    check_model(model, source)
    key = f"{section}.megatron_config"
    if (problem := next(parallel.find_indivisible(model.config.to_dict(), source, key), None)) is not None:
        raise ConfigError(problem)
    config = transformer_config(model, parallel)
    if lora is not None:
        add_adapter(model, lora)
        check_adapter(model, lora, section, config)
    return config


class MegatronStrategy(DistributedStrategy[MegatronScorer]):
    """Shards a Llama, Qwen2 or Qwen3 with Megatron-Core. Requires an initialized process group.

    Parameters are stored in Megatron-Core's layout. But synced weights, exports and checkpoints have the names and
    shapes of the Hugging Face model, so other strategies and layouts can load them.
    """

    def __init__(self, world: World, config: MegatronConfig, timeout: timedelta) -> None:
        """Create the pipeline, data, context and tensor process groups. `timeout` applies to their collectives."""
        super().__init__(world, save_group=new_save_group())
        self._config = config
        self._device = torch.device(world.device)
        if self._device.type == "cpu":
            warnings.filterwarnings("ignore", message="When using async grad allreduce")  # irrelevant on CPU
        pp_size, tp_size = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
        layout = Layout(world.size, tp_size, pp_size, config.context_parallel_size)
        shape = (pp_size, layout.data_parallel_size, layout.context_size, tp_size)  # the order of `Layout`
        mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
        groups = {name: mesh[name].get_group() for name in ("pp", "dp", "cp", "tp")}
        model_parallel = mesh["pp", "tp"]._flatten("mp")
        replicas = mesh["dp", "cp"]._flatten("dp_cp")  # ranks with the same parameters
        for part in (mesh, model_parallel, replicas):
            set_timeout(part, timeout)
        self._tp_mesh = mesh["tp"]
        self._groups = ProcessGroupCollection(
            **groups,
            mp=model_parallel.get_group(),
            dp_cp=replicas.get_group(),
            embd=None,  # this class initializes and updates tied embeddings itself
            pos_embd=None,
        )
        # (first stage, last stage) rank pairs: they hold the two copies of tied embeddings, whose gradients are summed
        pairs = [list(pair) for pair in zip(*torch.arange(world.size).view(pp_size, -1)[[0, -1]].tolist(), strict=True)]
        self._embedding_group = dist.new_subgroups_by_enumeration(pairs, timeout)[0] if pp_size > 1 else None
        initialize_rng_tracker(inference_rng_tracker=True)  # Megatron-Core requires one, but every dropout is 0
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()

    @property
    def random_stream(self) -> int:
        return dist.get_process_group_ranks(self._groups.tp)[0]

    @torch.no_grad()
    def build(self, spec: ModelSpec, *, entropy_grad: bool) -> MegatronScorer:
        with deferring() as weights:
            model = spec.load()
        is_empty = weights.source is not None
        dtypes = set_train_dtype(model, torch.float32, is_empty=is_empty) if spec.trains_all_weights else {}
        source = weights.source or f"the model {model.name_or_path}"
        config = configure(model, source, self._config, spec.section, spec.lora)
        n_vocab_rows = self._own_slice(model.get_input_embeddings().weight.shape, 0)[0][0]
        with computing_on(self._device):
            module = MegatronScorer(
                model, config, self._groups, n_vocab_rows, temperature=spec.temperature, entropy_grad=entropy_grad
            ).to(self._device)
        module.export_dtypes = dtypes
        module.stage.rotary_pos_emb.inv_freq = model.model.rotary_emb.inv_freq.clone().to(self._device)
        named, has_adapter = module.hf_parameters(), spec.lora is not None
        for name, part in module.parts.items():
            shape, offset = self._own_slice(named[name].shape, part.dim)
            values = torch.empty(shape, dtype=named[name].dtype)
            if weights.source is not None and not (has_adapter and name in module.saved_parts):
                weights.read(name, values, offset, dtypes.get(name))
            else:
                values.copy_(_slice(named[name], shape, offset))
            part.write(module.parameter_of(part), values)
        model.to("meta")
        model.tie_weights()
        return module

    def run(self, module: MegatronScorer, shard: Shard, consume: Consume[T], settings: Pass) -> list[T]:
        if not shard.micro_batches:
            return []

        def forward(remaining: Iterator[TrainingBatch], _: torch.nn.Module) -> Any:
            adjust_threads()
            RANK.progress()
            rows = next(remaining).to(self._device)
            with autocast(self._device, settings.bf16):
                return module(rows), partial(finish, rows)

        def finish(rows: TrainingBatch, scores: Scores) -> tuple[torch.Tensor, torch.Tensor, T]:
            loss, result = consume(scores, rows)
            return scores[0].sum() if loss is None else loss, torch.tensor(0), result

        schedule = get_forward_backward_func(self._groups.pp.size(), None)
        model = module.hf_model  # its modules hold the adapter's settings
        without_adapter = nullcontext() if settings.adapter else adapter_disabled(model)
        dropped = adapter_dropout(model) if settings.dropout else nullcontext()
        with computing_on(self._device), torch.set_grad_enabled(settings.backward), without_adapter, dropped:
            results: list[T] = schedule(
                forward_step_func=forward,
                data_iterator=map(shard.rows.select, shard.micro_batches),
                model=module.stage,
                num_microbatches=len(shard.micro_batches),
                seq_length=0,  # ignored, because micro-batches differ in length
                micro_batch_size=0,
                forward_only=not settings.backward,
                p2p_communicator=P2PCommunicator(self._groups.pp, module.stage.config),
                pg_collection=self._groups,
            )
        return results

    def clip_gradients(self, state: TrainState[MegatronScorer], max_norm: float) -> float:
        module = state.module
        self._sum_gradients(module)
        gradients = []
        for name, parameter in module.stage.named_parameters():
            # Count a parameter on exactly one of the ranks that have it.
            if name in module.replicated:
                is_counted = self._groups.tp.rank() == 0
            else:
                is_counted = not (module.has_copy(name) and name == HEAD_PARAMETER)
            if parameter.grad is not None and is_counted:
                gradients.append(parameter.grad)
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._device)
        dist.all_reduce(square, group=self._groups.mp)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
        return norm.item()

    @torch.no_grad()
    def _sum_gradients(self, module: MegatronScorer) -> None:
        """Sum each gradient over all ranks that contribute to it.

        These are ranks with other rows or tokens, tensor-parallel ranks that apply a replicated parameter to different
        heads or tokens, and for tied embeddings the first and the last stage.
        """
        for name, parameter in module.stage.named_parameters():
            if parameter.grad is None:
                continue
            total = parameter.grad.float()
            dist.all_reduce(total, group=self._groups.dp_cp)
            if module.has_partial_gradient(name):
                dist.all_reduce(total, group=self._groups.tp)
            if module.has_copy(name):
                dist.all_reduce(total, group=self._embedding_group)
            parameter.grad.copy_(total)

    def full_tensors(
        self, module: MegatronScorer, kind: SyncKind = "full", *, as_exported: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert as_exported, "ranks share no memory with an engine"  # an engine reads Hugging Face tensors
        return super().full_tensors(module, kind)

    def gather_from(self, module: MegatronScorer) -> Gather:
        names = {parameter: name for name, parameter in module.hf_parameters().items()}
        pipeline = self._groups.pp

        # A Hugging Face tensor is gathered in two steps. On the pipeline stage that has it, the tensor-parallel ranks
        # gather their slices, as `names` explains. Then the stage broadcasts it to all other stages, so every rank
        # calls this for every tensor in the same order, even for tensors that its stage lacks.
        def gather_part(described: torch.Tensor) -> torch.Tensor:
            assert isinstance(described, torch.nn.Parameter)
            name, shape = names[described], described.shape
            dtype = module.export_dtypes.get(name, described.dtype)
            owner = next(stage for stage, parts in enumerate(module.parts_of_stages) if name in parts)
            if owner == pipeline.rank():
                part = module.parts[name]
                tensor = gather(self._as_slice(part, module.parameter_of(part).detach(), shape)).to(dtype)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
            if pipeline.size() > 1:
                dist.broadcast(tensor, group=pipeline, group_src=owner)
            return tensor

        return gather_part

    @torch.no_grad()
    def load_tensors(self, module: MegatronScorer, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if part := module.parts.get(name):
                own = _slice(tensor, *self._own_slice(tensor.shape, part.dim))
                part.write(module.parameter_of(part), own)

    def _state_dict(self, state: TrainState[MegatronScorer], *, with_moments: bool) -> dict[str, Any]:
        module = state.module
        shapes = {name: parameter.shape for name, parameter in module.hf_parameters().items()}
        saved = {
            f"model.{name}": self._as_slice(part, module.parameter_of(part).detach(), shapes[name])
            for name, part in module.saved_parts.items()
        }
        if module.hf_model.config.tie_word_embeddings and EMBEDDINGS in module.saved_parts:
            saved[f"model.{HEAD}"] = saved[f"model.{EMBEDDINGS}"]  # checkpoints of other strategies have both names
        if not with_moments:
            return {"model": saved}
        assert state.optimizer is not None
        (group,) = state.optimizer.param_groups
        state.optimizer.init_state()
        moments: dict[str, Any] = {}
        for name, part in module.saved_parts.items():
            values = state.optimizer.state[module.parameter_of(part)]
            moments[f"state.model.{name}.step"] = values["step"]
            for kind in MOMENTS:
                moments[f"state.model.{name}.{kind}"] = self._as_slice(part, values[kind], shapes[name])
            moments |= {f"param_groups.model.{name}.{key}": group[key] for key in group if key != "params"}
        return {"model": saved, "optimizer": moments}

    @torch.no_grad()
    def _load_state_dict(self, state: TrainState[MegatronScorer], saved: dict[str, Any]) -> None:
        for name, part in state.module.saved_parts.items():
            parameter = state.module.parameter_of(part)
            part.write(parameter, local_part(saved["model"][f"model.{name}"])[0])
            if moments := saved.get("optimizer"):
                assert state.optimizer is not None
                values = state.optimizer.state[parameter]
                values["step"].copy_(moments[f"state.model.{name}.step"])
                for kind in MOMENTS:
                    part.write(values[kind], local_part(moments[f"state.model.{name}.{kind}"])[0])
                (group,) = state.optimizer.param_groups
                group |= {key: moments[f"param_groups.model.{name}.{key}"] for key in group if key != "params"}

    def _own_slice(self, shape: Sequence[int], dim: int | None) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shape and the offset of this rank's slice of a tensor."""
        if dim is None:
            return shape, (0,) * len(shape)
        return compute_local_shape_and_global_offset(torch.Size(shape), self._tp_mesh, [ShardedDim(dim)])

    def _as_slice(self, part: Part, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return this rank's part of a Hugging Face tensor of `shape`, as a DTensor if it is sharded.

        `values` are the Megatron-Core parameter, or a moment of the same shape.
        """
        own, _ = self._own_slice(shape, part.dim)
        local = part.read(values, own)
        if part.dim is None:
            return local
        if local.untyped_storage().nbytes() > local.nbytes:  # DCP's stager copies whole storages and fails for views
            local = local.clone()
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(local, self._tp_mesh, [ShardedDim(part.dim)], shape=torch.Size(shape), stride=stride)


def _slice(tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(first, first + n) for first, n in zip(offset, shape, strict=True))]
