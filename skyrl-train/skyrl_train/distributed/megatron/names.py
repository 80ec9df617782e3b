"""Map the tensors of a Hugging Face model to the parameters of a Megatron-Core pipeline stage.

Megatron-Core joins matrices and shards them over tensor-parallel ranks. For 4 query heads in 2 groups (each shares a
key and a value head), the rows of the joint matrix are, head by head,

    q0 q1 k0 v0 | q2 q3 k1 v1

and with 2 ranks, rank 0 has the left half. Hugging Face has q_proj = q0 q1 q2 q3, k_proj = k0 k1 and v_proj = v0 v1. So
rank 0's `Part` of q_proj selects q0 q1 from its half, and stacking the slices of both ranks gives q_proj.
Joining the slices along `dim` always yields the Hugging Face tensor: weight syncs, exports and checkpoints rely on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EMBEDDINGS_PARAMETER, HEAD_PARAMETER = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a Hugging Face tensor: some elements of a parameter of Megatron-Core."""

    parameter: str
    dim: int | None = None
    """Dimension of the tensor that is sharded over tensor-parallel ranks, or None if each rank has the whole tensor."""
    select: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    """Maps the parameter, or a tensor of its shape, to a view of this part's elements in Hugging Face order."""

    def read(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the part with shape `shape` from values of the parameter's shape. It is a view if possible."""
        return self.select(values).reshape(tuple(shape))

    def write(self, values: torch.Tensor, part: torch.Tensor) -> None:
        """Copy the part into values of the parameter's shape."""
        view = self.select(values)
        view.copy_(part.reshape(view.shape))


def find_parts(config: TransformerConfig, n_vocab_rows: int, *, is_tied: bool) -> list[dict[str, Part]]:
    """Return a tensor-parallel rank's part of each Hugging Face tensor by name, in one dict per pipeline stage.

    `n_vocab_rows` is the number of rows in the rank's slice of embeddings and head, without padding rows at its end. A
    head that is tied to the embeddings (`is_tied`) has their name. If the last stage is not the first, it has a copy.
    """
    n_stages = config.pipeline_model_parallel_size
    n_layers = config.num_layers // n_stages
    stages = []
    for stage in range(n_stages):
        parts: dict[str, Part] = {}
        if stage == 0:
            parts[EMBEDDINGS] = Part(EMBEDDINGS_PARAMETER, 0, lambda rows: rows[:n_vocab_rows])
        for index in range(n_layers):
            parts |= _find_parts_of_layer(config, stage * n_layers + index, index)
        if stage == n_stages - 1:
            parts["model.norm.weight"] = Part("decoder.final_layernorm.weight")
            head = EMBEDDINGS if is_tied else HEAD
            if head not in parts:
                parts[head] = Part(HEAD_PARAMETER, 0, lambda rows: rows[:n_vocab_rows])
        stages.append(parts)
    return stages


def _find_parts_of_layer(config: TransformerConfig, layer: int, index: int) -> dict[str, Part]:
    """Return the parts of layer number `layer` of the model, number `index` in its pipeline stage."""
    theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{index}."
    attention = f"{ours}self_attention."
    parts = {
        f"{theirs}input_layernorm.weight": Part(f"{ours}input_layernorm.weight"),
        f"{theirs}self_attn.o_proj.weight": Part(f"{attention}linear_proj.weight", 1),
        f"{theirs}post_attention_layernorm.weight": Part(f"{ours}pre_mlp_layernorm.weight"),
        f"{theirs}mlp.down_proj.weight": Part(f"{ours}mlp.linear_fc2.weight", 1),
    }
    for name in "qkv":
        select = partial(_select_heads, name, config)
        for kind in ("weight", "bias") if config.add_qkv_bias else ("weight",):
            parts[f"{theirs}self_attn.{name}_proj.{kind}"] = Part(f"{attention}linear_qkv.{kind}", 0, select)
    if config.qk_layernorm:
        for name in "qk":
            parts[f"{theirs}self_attn.{name}_norm.weight"] = Part(f"{attention}{name}_layernorm.weight")
    gate_up = f"{ours}mlp.linear_fc1.weight"
    parts[f"{theirs}mlp.gate_proj.weight"] = Part(gate_up, 0, lambda joint: joint.unflatten(0, (2, -1))[0])
    parts[f"{theirs}mlp.up_proj.weight"] = Part(gate_up, 0, lambda joint: joint.unflatten(0, (2, -1))[1])
    return parts


def _select_heads(name: str, config: TransformerConfig, qkv: torch.Tensor) -> torch.Tensor:
    """Return the rows of "q", "k" or "v" in a joint matrix or bias, as (groups, heads per group, head size, …)."""
    n_queries = config.num_attention_heads // config.num_query_groups
    heads = {"q": slice(0, n_queries), "k": slice(n_queries, n_queries + 1), "v": slice(n_queries + 1, None)}[name]
    return qkv.unflatten(0, (-1, n_queries + 2, config.kv_channels))[:, heads]
