"""Low-rank adapters for Megatron-Core's joint and sharded matrices, with the same results as peft's modules."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import linear
from transformers import PreTrainedModel

from skyrl_train.distributed.megatron.names import HEAD, Part, find_parts
from skyrl_train.errors import ConfigError
from skyrl_train.models.lora import NAME, adapter_layers, name_source
from skyrl_train.types.specs import LoraSpec


class JointAdapter(torch.nn.Module):
    """The adapters of the matrices that one linear layer of Megatron-Core joins, such as gate and up projection.

    In a column-parallel layer, each rank has all of A and its rows of B. In a row-parallel layer, it has its columns of
    A and all of B. Either way, ranks exchange only the products with A, and these are as narrow as the adapter's rank.
    With sequence parallelism, each rank multiplies a whole factor by its own tokens only.
    """

    def __init__(self, base: ColumnParallelLinear | RowParallelLinear, adapted: Mapping[str, tuple[Any, Part]]) -> None:
        """Create factors of zero.

        `adapted` has, for each matrix, e.g. "gate_proj", peft's module and this rank's part of the matrix. The module's
        scaling, dropout and switch are used. Its factors are ignored.
        """
        super().__init__()
        self._group = base.tp_group
        self._is_column_parallel = isinstance(base, ColumnParallelLinear)
        self._divides_tokens = base.config.sequence_parallel
        self._layers = {name: layer for name, (layer, _) in adapted.items()}  # a dict, so that they are no submodules
        self._parts = {name: part for name, (_, part) in adapted.items()}
        n_rows, n_columns = base.weight.shape
        self._n_rows = n_rows
        self.lora_A, self.lora_B = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name, (layer, part) in adapted.items():
            rank = layer.r[NAME]
            self.lora_A[name] = torch.zeros(rank, n_columns)
            self.lora_B[name] = torch.zeros(part.select(base.weight[:, 0]).numel(), rank)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the change of the layer's output for its `inputs` (L, B, columns)."""
        inputs = inputs.float()
        hidden = torch.cat([linear(self._drop(name, inputs), a) for name, a in self.lora_A.items()], dim=-1)
        if self._is_column_parallel and self._divides_tokens:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._group)
        elif self._is_column_parallel:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self._group)
        elif self._divides_tokens:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)
        else:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=self._group)
        joint = []  # each B on the rows of its matrix in the layer, and 0 on all other rows
        for name, b in self.lora_B.items():
            joint.append(b.new_zeros(self._n_rows, b.shape[1]))
            self._parts[name].write(joint[-1], b * self._layers[name].scaling[NAME])
        return linear(hidden, torch.cat(joint, dim=1))

    def add_change(
        self, _: Any, args: tuple[torch.Tensor], output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Add the change to the (output, bias) that the linear layer returns, unless the adapter is disabled."""
        result, bias = output
        if any(layer.disable_adapters for layer in self._layers.values()):
            return output
        return (result + self(args[0])).to(result.dtype), bias

    def _drop(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        """Apply a matrix's adapter dropout to its inputs.

        All tensor-parallel ranks draw the same random numbers for the whole input, and each rank takes its share.
        """
        dropout = self._layers[name].lora_dropout[NAME]
        if not isinstance(dropout, torch.nn.Dropout) or not dropout.training:
            return inputs
        n_ranks, shape = self._group.size(), list(inputs.shape)
        dim = -1 if not self._is_column_parallel else 0 if self._divides_tokens else None
        if dim is not None:
            shape[dim] *= n_ranks
        kept = inputs.new_empty(shape).bernoulli_(1 - dropout.p)
        if dim is not None:
            kept = kept.chunk(n_ranks, dim)[self._group.rank()]
        return inputs * kept / (1 - dropout.p)


def check_adapter(model: PreTrainedModel, lora: LoraSpec, section: str, config: TransformerConfig) -> None:
    """Raise ConfigError if an adapter includes the head, or has nothing to train in a pipeline stage.

    `section` is the key of the model's settings, e.g. trainer.policy.
    """
    source, layers = name_source(lora), adapter_layers(model)
    if HEAD.removesuffix(".weight") in layers:
        raise ConfigError(
            f"{source}: trainer.strategy=megatron has no adapter for the head lm_head; leave it out of "
            f"{lora.key}.target_modules, or set trainer.strategy=fsdp2"
        )
    stages = find_parts(config, 0, is_tied=model.config.tie_word_embeddings)
    for stage, parts in enumerate(stages):
        if not any(f"{path}.weight" in parts for path in layers):
            first, n_layers = stage * config.num_layers // len(stages), config.num_layers // len(stages)
            key = f"{section}.megatron_config.pipeline_model_parallel_size"
            raise ConfigError(
                f"{source} has no matrix of the layers {first} to {first + n_layers - 1}, and each of the "
                f"{key}={len(stages)} stages must train an adapter; set {key}=1, or choose other matrices"
            )


def find_adapter_parts(model: PreTrainedModel, parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return a rank's parts of the adapter's factors in a pipeline stage, from its `parts` of the model's tensors."""
    factors = {}
    for path in adapter_layers(model):
        if part := parts.get(f"{path}.weight"):
            adapter, name = f"{part.parameter.removesuffix('.weight')}.adapter", path.rpartition(".")[2]
            for factor, dim in zip("AB", (None, 0) if part.dim == 0 else (1, None), strict=True):
                factors[f"{path}.lora_{factor}.{NAME}.weight"] = Part(f"{adapter}.lora_{factor}.{name}", dim)
    return factors


def attach_adapter(stage: torch.nn.Module, model: PreTrainedModel, parts: Mapping[str, Part]) -> None:
    """Freeze a pipeline stage and add the model's adapter to its linear layers, with factors of zero."""
    stage.requires_grad_(False)
    adapted: dict[str, dict[str, tuple[Any, Part]]] = {}
    for path, layer in adapter_layers(model).items():
        if part := parts.get(f"{path}.weight"):
            matrices = adapted.setdefault(part.parameter.removesuffix(".weight"), {})
            matrices[path.rpartition(".")[2]] = (layer, part)
    for name, matrices in adapted.items():
        base: Any = stage.get_submodule(name)
        base.adapter = JointAdapter(base, matrices)
        base.register_forward_hook(base.adapter.add_change)
