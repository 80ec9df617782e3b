"""`trainer.policy.*`, `trainer.critic.*` and `trainer.ref.*`: the models and their optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator

from skyrl_train.config.base import (
    Allowed,
    Count,
    OptionalStringList,
    Resolved,
    Section,
    Text,
    as_tuple,
    resolved_later,
)

SchedulerName = Literal[
    "constant_with_warmup",
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "wsd",
]
Beta = Annotated[float, Ge(0), Lt(1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple), Allowed("a list of 2 numbers >= 0 and < 1")]


class LoraConfig(Section):
    """A low-rank adapter, trained in place of the model's own weights."""

    rank: Annotated[int, Ge(0)] = 0
    """Rank r of the adapter B·A of each matrix; 0 trains all weights, unless `lora_path` is set."""

    alpha: Count = 16
    """The adapter is scaled by alpha / rank."""

    target_modules: Annotated[
        Text | list[Text], Allowed("all-linear, a list of names of modules, or a regular expression of their paths")
    ] = "all-linear"
    """Matrices with an adapter: `all-linear` for all but the head, a list of names such as `[q_proj,v_proj]`, or a
    regular expression that matches whole paths."""

    exclude_modules: OptionalStringList = None
    """Names of modules among `target_modules` that get no adapter."""

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability that an input of the adapter is set to 0 in training; only in supervised fine-tuning. Rollouts are
    scored with the weights that sampled them, and the answers of a pair with equal weights."""

    init_method: Literal["kaiming", "gaussian"] = "kaiming"
    """Distribution of A: uniform within ±1/√in, or normal with standard deviation 1/rank. B is zero, so that training
    starts from the model itself."""

    lora_path: Text | None = None
    """Folder or Hub name of an adapter in peft's format to continue. Its rank, alpha and matrices are used; `rank` and
    `alpha` may be omitted. The optimizer state is new."""

    merge_on_export: bool = False
    """Export the whole model with the adapter merged into it, and the adapter in its subfolder `lora_adapter`; false
    exports the adapter only."""

    @property
    def is_used(self) -> bool:
        """True if an adapter is trained."""
        return self.rank > 0 or self.lora_path is not None


class PolicyModelConfig(Section):
    """The policy's weights."""

    path: Text = "Qwen/Qwen2.5-1.5B-Instruct"
    """A Hugging Face model name or a local folder."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights that are not trained, such as the reference and the model under an adapter, of exports, and of
    the weights sent to engines. Trained weights, their gradients and optimizer state are always float32, because most
    updates are too small to change a bfloat16 number. Separate from `trainer.bf16`, the type that the forward pass
    computes in."""

    lora: LoraConfig = LoraConfig()
    """A low-rank adapter, trained in place of the weights."""


class OptimizerConfig(Section):
    """AdamW, one step per mini-batch."""

    lr: Annotated[float, Ge(0), Le(1000)] = 1e-6
    """Learning rate after warm-up."""

    adam_betas: Betas = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""

    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay."""

    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Gradients with a larger norm are scaled down to it."""

    num_warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps, that is mini-batches, over which the learning rate rises from 0."""

    warmup_ratio: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Fraction of all optimizer steps over which the learning rate rises, in place of `num_warmup_steps`."""

    scheduler: SchedulerName = "constant_with_warmup"
    """Learning-rate schedule after warm-up, by its name in transformers; `wsd` (warm-up, stable, decay) stays constant
    and decays to 0 at the end. Other schedules with more settings than the number of steps are not supported."""

    wsd_decay_ratio: Annotated[float, Gt(0), Le(1)] = 0.1
    """Fraction of the steps after warm-up over which `scheduler=wsd` decays, as half a cosine."""


class FSDPConfig(Section):
    """Sharding of a model over several ranks."""

    fsdp_size: Annotated[int, Ge(-1)] = -1
    """Ranks that hold one copy of the weights together; -1: all. With a smaller number, such as the GPUs of a node,
    each group of neighboring ranks has its own copy and gathers weights only within the group."""

    reshard_after_forward: Annotated[bool | int, Allowed("true, false, or a number of ranks")] = True
    """Free gathered weights between the forward and the backward pass. `false` gathers once for both, with more memory;
    a number keeps them sharded over groups of that many ranks, which is faster where the groups are nodes."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, where the optimizer computes; a GPU holds one
    gathered block at a time."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which blocks are gathered and computed; gradients are always reduced, and logits computed, in float32.
    `auto` takes bfloat16 on GPUs with `trainer.bf16`, and otherwise the type of the weights."""


class MegatronConfig(Section):
    """Division of a model over several ranks with Megatron-Core; read with `trainer.strategy=megatron`."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share each matrix, best those of one node; divides the key-value heads of the model."""

    pipeline_model_parallel_size: Count = 1
    """Stages of the pipeline, groups of ranks that each hold consecutive layers; divides the layers of the model. Ranks
    that remain beside the tensor, pipeline and context sizes hold copies, which compute different rows."""

    sequence_parallel: bool = False
    """Between the matrices, divide activations by tokens among the ranks that share each matrix. Takes less memory."""

    context_parallel_size: Count = 1
    """Ranks that divide the tokens of each row in every layer, for long rows: activations take that much less memory on
    a rank. Attention gathers the keys and values of all of them."""

    expert_model_parallel_size: Annotated[Literal[1], Allowed("1: models with experts are not supported")] = 1
    """Only 1: models with experts are not supported."""

    expert_tensor_parallel_size: Annotated[
        Literal[1] | None, Allowed("1 or null: models with experts are not supported")
    ] = None
    """Only 1 or null: models with experts are not supported."""

    @property
    def n_ranks_of_copy(self) -> int:
        """Number of ranks that compute the same rows."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def describe_sizes(self, key: str) -> str:
        """Return the sizes above 1 whose product is `n_ranks_of_copy`, for error messages; `key` is this section's."""
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return " times ".join(f"{key}.{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1)

    def find_indivisible(self, model: Mapping[str, Any], source: str, key: str) -> Iterator[str]:
        """Yield a sentence for each size that does not divide its part of a model.

        Args:
            model: the configuration of the model; a part that it does not name is not checked.
            source: where the model is from, for the sentence.
            key: this section's, for the sentence.
        """
        n_heads = model.get("num_key_value_heads") or model.get("num_attention_heads")
        for name, count, parts in (
            ("tensor_model_parallel_size", n_heads, "key-value heads"),
            ("tensor_model_parallel_size", model.get("intermediate_size"), "columns of the MLP"),
            ("pipeline_model_parallel_size", model.get("num_hidden_layers"), "layers"),
        ):
            yield from find_indivisible(f"{key}.{name}", getattr(self, name), count, f"{parts} of {source}")


def find_indivisible(key: str, size: int, count: object, parts: str) -> Iterator[str]:
    """Yield a sentence if `size`, the value of `key`, does not divide `count`, which is checked if it is an integer."""
    if isinstance(count, int) and count % size:
        yield f"{key}={size} must divide the {count} {parts}; try {key}={math.gcd(count, size)}"


class ShardedModelConfig(Section):
    """A model on several ranks."""

    fsdp_config: FSDPConfig = FSDPConfig()
    """Sharding of the weights."""

    sequence_parallel_size: Count = 1
    """Ranks that divide the tokens of each row, for long rows: activations take that much less memory on a rank, and
    attention exchanges its heads (Ulysses). Must divide the number of ranks, and of attention heads."""


class DividedModelConfig(ShardedModelConfig):
    """A model on several ranks, which may also divide its matrices and layers."""

    megatron_config: MegatronConfig = MegatronConfig()
    """Division over several ranks with Megatron-Core."""


class PolicyConfig(DividedModelConfig):
    """The model that is trained."""

    model: PolicyModelConfig = PolicyModelConfig()
    """Source and type of the weights."""

    optimizer_config: OptimizerConfig = OptimizerConfig()
    """The optimizer and its schedule."""


class CriticModelConfig(Section):
    """The critic's weights."""

    path: Text | None = None
    """A Hugging Face model name or a local folder: a causal language model, whose value head then starts at zero, or an
    exported critic; null trains no critic."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of exports, and of the model under an adapter. Trained weights, their gradients and optimizer state are
    always float32."""

    lora: LoraConfig = LoraConfig()
    """A low-rank adapter, trained in place of the weights; the value head is trained with it."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW, one step per mini-batch."""

    lr: Annotated[float, Ge(0), Le(1000)] = 5e-6
    """Learning rate after warm-up."""


class CriticConfig(ShardedModelConfig):
    """The model that estimates values, for `advantage_estimator=gae`."""

    model: CriticModelConfig = CriticModelConfig()
    """Source and type of the weights."""

    optimizer_config: CriticOptimizerConfig = CriticOptimizerConfig()
    """The optimizer and its schedule."""


class RefModelConfig(Section):
    """The reference's weights."""

    path: Resolved[Text] = resolved_later()
    """A Hugging Face model name or a local folder; null takes `trainer.policy.model.path`."""


class RefConfig(DividedModelConfig):
    """The frozen model of the KL divergence, or the teacher of a distillation; loaded if its log-probs are read."""

    model: RefModelConfig = RefModelConfig()
    """Source of the weights."""

    def is_base_of(self, policy: PolicyModelConfig) -> bool:
        """Return True if the reference is the policy without its new adapter."""
        return policy.lora.is_used and policy.lora.lora_path is None and self.model.path == policy.path

    def shares_adapter_with(self, policy: PolicyModelConfig) -> bool:
        """Return True if the policy continues the adapter in `lora_path`, with which the reference starts, too."""
        return policy.lora.lora_path is not None and self.model.path == policy.path
