"""Specifications of ranks, models and their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skyrl_train.config.policy import (
    CriticModelConfig,
    FSDPConfig,
    LoraConfig,
    MegatronConfig,
    OptimizerConfig,
    PolicyModelConfig,
    TrainDtype,
)
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch

SPARE_BYTES = 64 * 2**20
"""Disk space to keep free beyond a checkpoint, for logs and metrics."""

Role = Literal["policy", "critic", "ref", "reward"]
SyncKind = Literal["full", "adapter", "factors", "base_and_factors"]
"""Tensors of a weight sync.

full              the model, with its adapter merged
adapter           the adapter, for copies that have its modules
factors           the low-rank factors of each changed matrix, for copies that hold the base
base_and_factors  the factors, then the base"""
ModelPart = Literal["weights", "optimizer", "all"]
"""Part of a model in memory. `optimizer` includes the gradients."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank among the `size` ranks of a model."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Layout:
    """Split of a model's ranks into groups that compute the same rows.

    `tensor_size` consecutive ranks shard each matrix (tensor parallelism). `context_size` consecutive groups of these
    split the tokens of each row (context parallelism). `n_stages` groups of these split the layers (pipeline
    parallelism). Together they are one data-parallel rank with its own rows. All ranks of a stage are consecutive.

    Eight ranks with tensor_size 2 and n_stages 2 are two data-parallel ranks:

        stage 0   ranks 0 1 (data-parallel rank 0)   2 3 (data-parallel rank 1)
        stage 1   ranks 4 5 (data-parallel rank 0)   6 7 (data-parallel rank 1)

    >>> layout = Layout(n_ranks=8, tensor_size=2, n_stages=2)
    >>> [layout.data_parallel_rank(rank) for rank in range(8)], layout.leader(1)
    ([0, 0, 1, 1, 0, 0, 1, 1], 6)
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
        """Return the rank that reports the results of a data-parallel rank: the first rank of its last stage."""
        return ((self.n_stages - 1) * self.data_parallel_size + data_parallel_rank) * self.group_size


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer with a learning-rate schedule over `n_steps` optimizer steps."""

    config: OptimizerConfig
    n_steps: int
    seed: int = 0  # for stochastic rounding

    @property
    def n_warmup_steps(self) -> int:
        """Number of steps in which the learning rate rises."""
        return self.config.num_warmup_steps or int(self.config.warmup_ratio * self.n_steps)

    @property
    def n_decay_steps(self) -> int:
        """Number of last steps in which `scheduler=wsd` lowers the learning rate."""
        return round(self.config.wsd_decay_ratio * max(0, self.n_steps - self.n_warmup_steps))


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A low-rank adapter of a model."""

    config: LoraConfig
    key: str  # configuration key, e.g. "trainer.policy.model.lora", for error messages
    base_path: str
    """Folder or Hub name of the model without the adapter. It is written into the adapter's settings."""
    seed: int = 0  # for initial values, the same on every rank
    trains_vision: bool = True  # add the adapter to the image encoder, too


def lora_spec(model: PolicyModelConfig | CriticModelConfig, key: str, seed: int) -> LoraSpec | None:
    """Return the specification of a model's adapter, with its settings at `key`, or None without an adapter."""
    if model.path is None or not model.lora.is_used:
        return None
    return LoraSpec(model.lora, key, absolute(model.path), seed, not model.freeze_vision)


def absolute(path: str) -> str:
    """Return the absolute path of a folder. A name that is no folder is a Hub name and stays."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a run: its source, and how its ranks compute."""

    role: Role
    load: Callable[[], Any]
    """Function that returns the `PreTrainedModel`, on the rank's device."""
    save_tokenizer: Callable[[str], Any]
    """Function that writes the tokenizer into a folder, for exports and checkpoints."""
    eos_ids: tuple[int, ...] = ()  # tokens that end a trained turn, for exports
    optimizer: OptimizerSpec | None = None  # None: the model is frozen
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    sequence_parallel_size: int = 1  # ranks that get the same rows and split their tokens
    megatron: MegatronConfig | None = None  # if set, several ranks use Megatron-Core instead of FSDP2
    lora: LoraSpec | None = None  # if set, only the adapter and a critic's value head are trained
    train_dtype: TrainDtype = "float32"  # of trained weights; adapters and value heads are float32
    trains_vision: bool = False  # train the image encoder of a vision-language model
    replays_experts: bool = False  # use the experts that the engine chose
    temperature: float = 1.0
    bf16: bool = False  # compute in bfloat16 on a GPU
    activation_offload: bool = False  # keep activations for the backward pass in host memory
    max_tokens_per_micro_batch: int | None = None  # None: `default_max_tokens` of the model
    max_rows_forward: int | None = None
    max_rows_train: int | None = None

    @property
    def trains_all_weights(self) -> bool:
        """True if all weights of the model are trained, not only an adapter."""
        return self.optimizer is not None and self.lora is None

    @property
    def section(self) -> str:
        """Configuration section of the model, for error messages."""
        return f"trainer.{'policy' if self.role == 'reward' else self.role}"

    def layout(self, n_ranks: int) -> Layout:
        """Return the layout of `n_ranks` ranks. A single rank has the whole model.

        Raises:
            ConfigError: `n_ranks` is not a multiple of the ranks that compute the same rows.
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
    """One tensor of a model, under its name in a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize
