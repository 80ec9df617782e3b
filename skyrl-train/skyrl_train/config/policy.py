"""`trainer.policy.*`, `trainer.critic.*` and `trainer.ref.*`: the models and their optimizers."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator

from skyrl_train.config.base import Allowed, Count, OptionalStringList, Resolved, Section, Text, resolved_later

SchedulerName = Literal[
    "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd"
]
TrainDtype = Literal["float32", "bfloat16"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
LearningRate = Annotated[float, Ge(0), Le(1000)]
Beta = Annotated[float, Ge(0), Lt(1)]
Betas = Annotated[
    tuple[Beta, Beta],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),  # YAML has no tuples
    Allowed("a list of 2 numbers >= 0 and < 1"),
]


class LoraConfig(Section):
    """LoRA: train a low-rank adapter and freeze the model's own weights."""

    rank: Annotated[int, Ge(0)] = 0
    """Rank r of each matrix's adapter B·A. 0 trains all weights, unless `lora_path` is set."""

    alpha: Count = 16
    """The adapter is scaled by alpha / rank."""

    target_modules: Annotated[
        Text | list[Text], Allowed("all-linear, a list of names of modules, or a regular expression of their paths")
    ] = "all-linear"
    """Matrices that get an adapter: `all-linear` (all except the head), a list of module names such as
    `[q_proj,v_proj]`, or a regular expression that must match the full module path."""

    exclude_modules: OptionalStringList = None
    """Names of modules to exclude from `target_modules`."""

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout probability on the adapter's input. Only for supervised fine-tuning. RL must score rollouts with the
    weights that sampled them, and preference training must score both answers of a pair with the same weights."""

    init_method: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial distribution of A: `kaiming` is uniform in ±1/√in, `gaussian` is normal with standard deviation 1/rank.
    B starts at zero, so the adapter initially leaves the model unchanged."""

    lora_path: Text | None = None
    """Folder or Hub name of a PEFT adapter to continue training. Its rank, alpha and matrices are used: `rank` and
    `alpha` may be omitted. The optimizer state starts fresh."""

    merge_on_export: bool = False
    """Export the full model with the adapter merged in, plus the adapter in the subfolder `lora_adapter`. `false`
    exports only the adapter."""

    quantize_base: Literal["none", "nf4"] = "none"
    """`nf4` holds the frozen matrices of the transformer blocks in 4 bits (QLoRA): 0.52 bytes per parameter instead of
    2 or 4. The adapter stays float32. Embeddings, heads, norms, experts and image encoders are not quantized."""

    @property
    def is_quantized(self) -> bool:
        """True if the frozen matrices are held in 4 bits."""
        return self.quantize_base != "none"

    @property
    def is_used(self) -> bool:
        """True if an adapter is trained."""
        return self.rank > 0 or self.lora_path is not None


class PolicyModelConfig(Section):
    """The policy's weights."""

    path: Text = "Qwen/Qwen2.5-1.5B-Instruct"
    """A Hugging Face model name or a local folder."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of frozen weights (the reference, or the model under an adapter), of exports, and of the weights sent to
    engines. The dtype of trained weights is `train_dtype`. On GPUs, `trainer.bf16` sets the dtype of the forward
    pass."""

    train_dtype: TrainDtype = "float32"
    """Dtype of trained weights. `bfloat16` takes 2 bytes per weight instead of 4, and computes in bfloat16 on all
    devices. Gradients are still added up in float32, and the optimizer computes in float32 and rounds stochastically
    (`optimizer_config.stochastic_rounding`). Adapters and value heads are always float32."""

    lora: LoraConfig = LoraConfig()

    freeze_vision: bool = True
    """Train only the language model of a vision-language model, not its image encoder. With LoRA, only the language
    model gets an adapter. No effect on text models."""


class OptimizerConfig(Section):
    """The optimizer, one step per mini-batch."""

    name: OptimizerName = "adamw"
    """`adamw` has two float32 moments per weight: 8 bytes. `adamw_8bit` is AdamW with moments in 8 bits, in blocks of
    256 values with one scale: 2 bytes. `muon` is Muon for hidden matrices, with one float32 moment (4 bytes), and AdamW
    for embeddings, heads and vectors. Its updates have the size of AdamW's, so the same learning rates work."""

    stochastic_rounding: bool = True
    """Round updated bfloat16 weights up or down at random, so that the expected weight is exact. `false` rounds to
    nearest, and most updates are then lost. No effect with `train_dtype=float32` or `cpu_offload`."""

    cpu_offload: bool = False
    """Keep gradients, optimizer state and float32 master weights in host memory, and run the optimizer step on the CPU.
    For one rank: with several, set `fsdp_config.cpu_offload`."""

    lr: LearningRate = 1e-6
    """Learning rate after warm-up."""

    adam_betas: Betas = (0.9, 0.999)
    """AdamW's β₁ and β₂: decay rates of the running means of the gradient and of its square."""

    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay coefficient."""

    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Gradients with a larger norm are scaled down to this norm."""

    num_warmup_steps: Annotated[int, Ge(0)] = 0
    """Number of optimizer steps of linear warm-up from 0."""

    warmup_ratio: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Warm-up as a fraction of all optimizer steps. Use this or `num_warmup_steps`, not both."""

    scheduler: SchedulerName = "constant_with_warmup"
    """Learning-rate schedule after warm-up, by its transformers name. `wsd` (warm-up, stable, decay) stays constant and
    decays to 0 at the end. Schedules that need other settings are not supported."""

    wsd_decay_ratio: Annotated[float, Gt(0), Le(1)] = 0.1
    """Fraction of the steps after warm-up that `scheduler=wsd` spends on its cosine decay."""


class FSDPConfig(Section):
    """Sharding of a model over several ranks."""

    fsdp_size: Annotated[int, Ge(-1)] = -1
    """Number of consecutive ranks that share one copy of the weights. -1 shards over all ranks. A smaller group, such
    as the GPUs of a node, keeps all-gathers inside the group, at the cost of one copy per group."""

    reshard_after_forward: Annotated[bool | int, Allowed("true, false, or a number of ranks")] = True
    """Free gathered weights between the forward and the backward pass. `false` gathers them once for both passes and
    needs more memory. A number keeps them sharded over groups of that many ranks: faster if a group is a node."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and run the optimizer there. A GPU holds one gathered
    block at a time."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype to gather and compute blocks in. `auto` is bfloat16 on GPUs with `trainer.bf16=true`, otherwise
    the dtype of the weights. Gradient reduction and logits are always float32."""


class MegatronConfig(Section):
    """Model parallelism with Megatron-Core, for `trainer.strategy=megatron`."""

    tensor_model_parallel_size: Count = 1
    """Number of ranks that share each matrix, ideally on one node. Must divide the model's key-value heads."""

    pipeline_model_parallel_size: Count = 1
    """Number of pipeline stages. Each holds a block of consecutive layers. Must divide the model's layers. Ranks beyond
    tensor × pipeline × context size are data-parallel copies."""

    sequence_parallel: bool = False
    """Split the activations between matrices by tokens over the tensor-parallel ranks, to save memory."""

    context_parallel_size: Count = 1
    """Number of ranks that split the tokens of each row, for long rows. Divides the activation memory per rank by this
    number. Attention gathers keys and values from all of them."""

    expert_model_parallel_size: Annotated[Literal[1], Allowed("1: models with experts are not supported")] = 1
    """Must be 1: models with experts are not supported."""

    expert_tensor_parallel_size: Annotated[
        Literal[1] | None, Allowed("1 or null: models with experts are not supported")
    ] = None
    """Must be 1 or null: models with experts are not supported."""

    @property
    def n_ranks_of_copy(self) -> int:
        """Number of ranks in one data-parallel copy, i.e. ranks that compute the same rows."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def describe_sizes(self, key: str) -> str:
        """Format the sizes above 1 for error messages. Their product is `n_ranks_of_copy`. `key` names this section."""
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return " times ".join(f"{key}.{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1)

    def find_indivisible(self, model: Mapping[str, Any], source: str, key: str) -> Iterator[str]:
        """Yield a sentence for each parallel size that does not divide its part of the model.

        `model` is the model's configuration. Parts missing from it are not checked. The sentences call the model
        `source` and this section `key`.
        """
        n_heads = model.get("num_key_value_heads") or model.get("num_attention_heads")
        for name, count, parts in (
            ("tensor_model_parallel_size", n_heads, "key-value heads"),
            ("tensor_model_parallel_size", model.get("intermediate_size"), "columns of the MLP"),
            ("pipeline_model_parallel_size", model.get("num_hidden_layers"), "layers"),
        ):
            yield from find_indivisible(f"{key}.{name}", getattr(self, name), count, f"{parts} of {source}")


def find_indivisible(key: str, size: int, count: object, parts: str) -> Iterator[str]:
    """Yield a sentence if `size`, the value of `key`, does not divide `count`. Only an integer `count` is checked."""
    if isinstance(count, int) and count % size:
        yield f"{key}={size} must divide the {count} {parts}; try {key}={math.gcd(count, size)}"


class ShardedModelConfig(Section):
    """A model on several ranks."""

    fsdp_config: FSDPConfig = FSDPConfig()

    sequence_parallel_size: Count = 1
    """Number of ranks that split the tokens of each row (Ulysses), for long rows. Divides the activation memory per
    rank by this number. Must divide the number of ranks and the number of attention heads."""


class DividedModelConfig(ShardedModelConfig):
    """A model on several ranks, sharded with FSDP2 or split with Megatron-Core."""

    megatron_config: MegatronConfig = MegatronConfig()


class PolicyConfig(DividedModelConfig):
    """The trained model."""

    model: PolicyModelConfig = PolicyModelConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CriticModelConfig(Section):
    """The critic's weights."""

    path: Text | None = None
    """Hugging Face model name or local folder of a causal language model or an exported critic. A language model gets a
    value head that starts at zero. null trains no critic."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of exports and of the frozen model under an adapter. The dtype of trained weights is `train_dtype`."""

    train_dtype: TrainDtype = "float32"
    """Dtype of trained weights. `bfloat16` takes 2 bytes per weight instead of 4, and computes in bfloat16 on all
    devices. Gradients are still added up in float32, and the optimizer computes in float32 and rounds stochastically
    (`optimizer_config.stochastic_rounding`). Adapters and value heads are always float32."""

    lora: LoraConfig = LoraConfig()
    """LoRA adapter, trained together with the value head instead of the weights."""

    freeze_vision: bool = True
    """Train only the language model and the value head of a vision-language critic, not its image encoder. With LoRA,
    only the language model gets an adapter. No effect on text models."""


class CriticOptimizerConfig(OptimizerConfig):
    lr: LearningRate = 5e-6


class CriticConfig(ShardedModelConfig):
    """The value model, for `advantage_estimator=gae`."""

    model: CriticModelConfig = CriticModelConfig()
    optimizer_config: CriticOptimizerConfig = CriticOptimizerConfig()


class RefModelConfig(Section):
    """The reference's weights."""

    path: Resolved[Text] = resolved_later()
    """Hugging Face model name or local folder. Defaults to `trainer.policy.model.path`."""


class RefConfig(DividedModelConfig):
    """The frozen reference for the KL terms, or the teacher in distillation. Only loaded if its log-probs are used."""

    model: RefModelConfig = RefModelConfig()

    def is_base_of(self, policy: PolicyModelConfig) -> bool:
        """Return True if the reference is the policy without its new adapter."""
        return policy.lora.is_used and policy.lora.lora_path is None and self.model.path == policy.path

    def shares_adapter_with(self, policy: PolicyModelConfig) -> bool:
        """Return True if the policy continues the adapter in `lora_path`, with which the reference also starts."""
        return policy.lora.lora_path is not None and self.model.path == policy.path
