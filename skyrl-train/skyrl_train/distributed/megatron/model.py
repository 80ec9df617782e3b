"""Language models in Megatron-Core, and the module that scores tokens with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.distributed.megatron.context import attend, find_own_positions, take_own_tokens
from skyrl_train.distributed.megatron.lora import attach_adapter, find_adapter_parts
from skyrl_train.distributed.megatron.names import EMBEDDINGS_PARAMETER, HEAD_PARAMETER, Part, find_parts
from skyrl_train.errors import ConfigError
from skyrl_train.models.linear_head import linear_head_scores
from skyrl_train.models.logprobs import align_left, find_predictions, on_mask
from skyrl_train.models.lora import adapter_config, merged_names, trained_parameters
from skyrl_train.models.scoring_module import Scorer
from skyrl_train.models.sequence_parallel import sum_over_ranks
from skyrl_train.types import TokenScores, TrainingBatch

SUPPORTED = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3")
"""Types of position embeddings with frequencies that do not depend on the length, and values that are not scaled."""


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with the constructor arguments that Megatron-Core passes."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


class CausalAttention(torch.nn.Module):
    """PyTorch's attention, as in Hugging Face models. The causal mask is enough, because padding is on the right."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__()
        self._context_group = pg_collection.cp

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return (L, B, heads · head size) for queries (L, B, heads, head size), keys and values (L, B, groups, …).

        With context parallelism, L is the number of this rank's tokens.
        """
        if self._context_group.size() > 1:
            attended = attend(query, key, value, self._context_group)
        else:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # (B, heads, L, …)
            attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


class CheckpointedLayer(TransformerLayer):
    """A layer that recomputes its activations in the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


class GPT(GPTModel):
    """A pipeline stage. The last stage returns final hidden states (L, B, H), because the head reads only some."""

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def check_model(model: PreTrainedModel, source: str) -> None:
    """Raise ConfigError if Megatron-Core cannot compute the model. `source` is its key and path."""
    config, name = model.config, type(model).__name__
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    problem = None
    if not isinstance(model, SUPPORTED):
        problem = f"a {name}"
    elif config.hidden_act != "silu":
        problem = f"the activation {config.hidden_act}"
    elif "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        problem = "sliding-window attention"
    elif rope_type not in STATIC_ROPE:
        problem = f"position embeddings of type {rope_type}"
    else:
        (parts,) = find_parts(transformer_config(model, MegatronConfig()), 0, is_tied=config.tie_word_embeddings)
        if unknown := {name for name, _ in model.named_parameters()} ^ parts.keys():
            problem = f"the tensor {min(unknown)} of a {name}"
    if problem is not None:
        raise ConfigError(
            f"{source}: trainer.strategy=megatron does not support {problem}; set trainer.strategy=fsdp2, or use a "
            "Llama, Qwen2 or Qwen3"
        )


def transformer_config(model: PreTrainedModel, parallel: MegatronConfig) -> TransformerConfig:
    """Return Megatron-Core's configuration of a supported model."""
    hf, names = model.config, {name for name, _ in model.named_parameters()}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        qk_layernorm="model.layers.0.self_attn.q_norm.weight" in names,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=model.dtype,
        pipeline_dtype=model.dtype,
        use_cpu_initialization=True,
        perform_initialization=False,  # the weights are read from a file
        variable_seq_lengths=True,  # micro-batches have different lengths
        moe_token_dispatcher_type="alltoall",  # the default rejects variable lengths, even without experts
        calculate_per_token_loss=True,  # the loss is a sum, so the schedule must not divide it
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )


def new_stage(
    config: TransformerConfig, groups: ProcessGroupCollection, n_padded: int, *, is_tied: bool, recomputes: bool
) -> GPT:
    """Return this rank's part of a model, with uninitialized weights. `recomputes` turns on gradient checkpointing.

    `n_padded` is the size of the vocabulary, padded to a multiple of the tensor-parallel size.
    """
    norm_of_heads = RMSNorm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=CheckpointedLayer if recomputes else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm_of_heads,
                    k_layernorm=norm_of_heads,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    stage = groups.pp.rank()
    return GPT(
        config,
        TransformerBlockSubmodules(
            layer_specs=[layer] * (config.num_layers // config.pipeline_model_parallel_size), layer_norm=RMSNorm
        ),
        vocab_size=n_padded,
        max_sequence_length=0,  # read for learned positions only
        pre_process=stage == 0,
        post_process=stage == groups.pp.size() - 1,
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type="rope",
        pg_collection=groups,
    )


class MegatronScorer(Scorer):
    """A scorer with this rank's part of a language model in Megatron-Core."""

    def __init__(
        self,
        hf_model: PreTrainedModel,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        n_vocab_rows: int,
        *,
        temperature: float,
        entropy_grad: bool,
    ) -> None:
        """Create this rank's part of a model, with weights of zero. `hf_model` may have an adapter.

        `n_vocab_rows` is the number of rows in the rank's slice of embeddings and head, without padding rows.
        """
        super().__init__()
        n_padded = hf_model.config.vocab_size + -hf_model.config.vocab_size % groups.tp.size()
        is_tied = hf_model.config.tie_word_embeddings
        self.stage = new_stage(config, groups, n_padded, is_tied=is_tied, recomputes=hf_model.is_gradient_checkpointing)
        self._hf_models = [hf_model]  # a list hides it from torch, because it is no submodule
        base_parts = find_parts(config, n_vocab_rows, is_tied=is_tied)
        self.parts_of_stages = [parts | find_adapter_parts(hf_model, parts) for parts in base_parts]
        self.parts = self.parts_of_stages[groups.pp.rank()]
        self.saved_parts = self.parts
        if adapter_config(hf_model) is not None:
            attach_adapter(self.stage, hf_model, self.parts)
            self.saved_parts = find_adapter_parts(hf_model, self.parts)
        self.replicated = {part.parameter for part in self.parts.values() if part.dim is None}
        """Parameters that each tensor-parallel rank holds as a whole."""
        self._n_vocab_rows = n_vocab_rows
        self._temperature = temperature
        self._entropy_grad = entropy_grad
        padding: Any = hf_model.get_input_embeddings().padding_idx
        if self.stage.pre_process and padding is not None:
            self.stage.embedding.word_embeddings.register_forward_hook(partial(_freeze_padding, padding))
        self.stage.eval()
        for parameter in self.stage.parameters():
            parameter.data.zero_()

    @property
    def hf_model(self) -> PreTrainedModel:
        return self._hf_models[0]

    def hf_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the Hugging Face model and of its adapter, under the names of `parts`."""
        return dict(merged_names(self.hf_model)) | trained_parameters(self.hf_model)

    def parameter_of(self, part: Part) -> torch.nn.Parameter:
        """Return the parameter that holds a part of this rank."""
        return self.stage.get_parameter(part.parameter)

    def has_partial_gradient(self, parameter: str) -> bool:
        """Return True for a replicated parameter that each tensor-parallel rank applies to its own heads or tokens.

        Its gradient is then the sum over these ranks.
        """
        is_norm_of_heads = parameter.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        return parameter in self.replicated and (self.stage.config.sequence_parallel or is_norm_of_heads)

    def has_copy(self, parameter: str) -> bool:
        """Return True for tied embeddings that are copied to the first and the last pipeline stage."""
        is_end = parameter in (EMBEDDINGS_PARAMETER, HEAD_PARAMETER)
        return is_end and self.hf_model.config.tie_word_embeddings and len(self.parts_of_stages) > 1

    def requires_grad_(self, requires_grad: bool = True) -> MegatronScorer:
        """Freeze or unfreeze the parameters."""
        self.hf_model.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def forward(self, rows: TrainingBatch) -> torch.Tensor | TokenScores:
        """Return the scores (B, R) of a micro-batch on the last pipeline stage, hidden states on all earlier stages."""
        token_ids = align_left(rows.sequences, rows.attention_mask)  # (B, L)
        config, groups = self.stage.config, self.stage.pg_collection
        is_divided = groups.cp.size() > 1
        n_slices = (groups.tp.size() if config.sequence_parallel else 1) * (2 * groups.cp.size() if is_divided else 1)
        token_ids = torch.nn.functional.pad(token_ids, (0, -token_ids.shape[1] % n_slices))
        own_ids = take_own_tokens(token_ids, groups.cp) if is_divided else token_ids
        hidden: torch.Tensor = self.stage(own_ids, None, None)  # (L, B, H), or a slice of L with sequence parallelism
        if not self.stage.post_process:
            return hidden
        # Each tensor-parallel rank has the head for some tokens of the vocabulary, so the gradient of hidden states is
        # the sum over ranks. Both functions add it up in the backward pass.
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=groups.tp)
        mask = rows.loss_mask.bool()
        row, position = find_predictions(rows.attention_mask, rows.loss_mask)
        if is_divided:
            is_own, position = find_own_positions(position, token_ids.shape[1], groups.cp)
            row, mask = row[is_own], mask.masked_scatter(mask, is_own)
        chosen = rows.sequences[:, -mask.shape[1] :][mask]  # (N,)
        weight = self.stage.output_layer.weight
        if weight is None:
            weight = self.stage.shared_embedding_or_output_weight()
        scores = linear_head_scores(
            hidden[position, row],
            weight if len(weight) == self._n_vocab_rows else weight[: self._n_vocab_rows],
            None,
            chosen - groups.tp.rank() * len(weight),
            1 / self._temperature,
            entropy_grad=self._entropy_grad,
            group=groups.tp,
        )
        on_rank = TokenScores(*(on_mask(values, mask, None) for values in scores))
        return TokenScores(*(sum_over_ranks(values, groups.cp) for values in on_rank)) if is_divided else on_rank


def _freeze_padding(
    padding: int, module: VocabParallelEmbedding, args: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    """Keep the padding token's embedding fixed, as Hugging Face does, even where the token was sampled.

    `output` is (B, L, H), or with sequence parallelism this rank's tokens (L / ranks, B, H).
    """
    is_padding = args[0] == padding  # (B, L)
    if module.reduce_scatter_embeddings:
        is_padding = is_padding.T.contiguous().chunk(module.tp_group.size())[module.tp_group.rank()]
    return torch.where(is_padding[..., None], output.detach(), output)
