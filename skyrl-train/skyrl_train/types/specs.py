"""Specifications of ranks, models and their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skyrl_train.config.policy import CriticModelConfig, FSDPConfig, LoraConfig, MegatronConfig, PolicyModelConfig
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch

SPARE_BYTES = 64 * 2**20
"""Free disk beyond what a checkpoint needs, for logs and metrics."""

Role = Literal["policy", "critic", "ref", "reward"]
SyncKind = Literal["full", "adapter", "factors", "base_and_factors"]
"""The tensors of a weight sync: `full`, those of the model with its adapter merged into them. `adapter`, those of the
adapter, for copies that have its modules. `factors`, those of the adapter's change of each matrix, for copies that hold
the model without it. `base_and_factors`, the factors and then the model without the adapter."""
ModelPart = Literal["weights", "optimizer", "all"]
"""A part of a model in memory: its weights, or its gradients and the state of its optimizer."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank among the `size` ranks of a model."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of a model's ranks into groups that compute the same rows.

    `tensor_size` consecutive ranks share each matrix (tensor parallelism), and `context_size` such groups, also
    consecutive, share the tokens of each row (context parallelism). `n_stages` groups of these ranks share the layers
    (pipeline parallelism). Together they are a data-parallel rank, which has its own rows. All ranks of a stage are
    consecutive.
    """

    n_ranks: int
    tensor_size: int = 1
    n_stages: int = 1
    context_size: int = 1

    @property
    def group_size(self) -> int:
        """Number of consecutive ranks that compute the same rows in a stage."""
        return self.tensor_size * self.context_size

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.n_ranks // (self.group_size * self.n_stages)

    def data_parallel_rank(self, rank: int) -> int:
        """Return the data-parallel rank that a rank belongs to."""
        return rank // self.group_size % self.data_parallel_size

    def leader(self, data_parallel_rank: int) -> int:
        """Return the rank that returns the results of a data-parallel rank: the first one of its last stage."""
        return ((self.n_stages - 1) * self.data_parallel_size + data_parallel_rank) * self.group_size


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with a learning-rate schedule over `n_steps` optimizer steps."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    scheduler: str
    n_warmup_steps: int
    n_steps: int
    n_decay_steps: int = 0  # at the end of the schedule wsd


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A low-rank adapter of a model."""

    config: LoraConfig
    key: str  # of `config`, e.g. "trainer.policy.model.lora"; for error messages
    base_path: str
    """Folder or Hub name of the model without the adapter, which is written into the adapter's settings."""
    seed: int = 0  # of its initial values: the same on every rank


def lora_spec(model: PolicyModelConfig | CriticModelConfig, key: str, seed: int) -> LoraSpec | None:
    """Return the specification of a model's adapter, whose settings are at `key`; None if it has none."""
    if model.path is None or not model.lora.is_used:
        return None
    return LoraSpec(model.lora, key, absolute(model.path), seed)


def absolute(path: str) -> str:
    """Return the absolute path of a folder; another name is one on the Hub."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a run: its source, and how its ranks compute."""

    role: Role
    load: Callable[[], Any]
    """Returns the `PreTrainedModel`, on the rank's device."""
    save_tokenizer: Callable[[str], Any]
    """Writes the tokenizer into a folder; called for exports and checkpoints."""
    eos_ids: tuple[int, ...] = ()  # tokens that end a trained turn, for exports
    optimizer: OptimizerSpec | None = None  # None: the model is frozen
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    sequence_parallel_size: int = 1  # ranks that get the same rows, and divide their tokens
    megatron: MegatronConfig | None = None  # set: several ranks use Megatron-Core, not FSDP2
    lora: LoraSpec | None = None  # set: only the adapter, and a critic's value head, are trained
    temperature: float = 1.0
    bf16: bool = False  # compute in bfloat16 on a GPU
    max_tokens_per_micro_batch: int | None = None  # None: `default_max_tokens` of the model
    max_rows_forward: int | None = None
    max_rows_train: int | None = None

    @property
    def trains_all_weights(self) -> bool:
        """True if the weights of the model are trained, not only an adapter."""
        return self.optimizer is not None and self.lora is None

    @property
    def section(self) -> str:
        """The section of the model in the configuration, for error messages."""
        return f"trainer.{'policy' if self.role == 'reward' else self.role}"

    def layout(self, n_ranks: int) -> Layout:
        """Return the division of `n_ranks` ranks; a single one has the whole model.

        Raises:
            ConfigError: the ranks are not a multiple of those that compute the same rows.
        """
        if self.megatron is None or n_ranks == 1:
            layout = Layout(n_ranks, context_size=self.sequence_parallel_size)
            sizes = f"{self.section}.sequence_parallel_size={layout.context_size}"
        else:
            megatron = self.megatron
            tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
            layout = Layout(n_ranks, tensor, pipeline, megatron.context_parallel_size)
            sizes = megatron.describe_sizes(f"{self.section}.megatron_config")
        size = layout.group_size * layout.n_stages
        if n_ranks % size:
            raise ConfigError(
                f"{sizes} must divide the {n_ranks} {'rank' if n_ranks == 1 else 'ranks'} of the {self.role}; start "
                f"{n_ranks + -n_ranks % size}, or set 1"
            )
        return layout


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model, named as in a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize
