"""A tiny configuration of each architecture in `docs/reference/models.md`, and what the page says of it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

SIZES: dict[str, Any] = {
    "vocab_size": 488,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
}
WINDOW = {"sliding_window": 6}  # shorter than the rows of a test
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
MLA |= {"head_dim": 4, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4},
    "ministral3": {},
    "qwen2": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen3_next": MOE | LINEAR | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": MOE | LINEAR | {"shared_expert_intermediate_size": 16},
    "gemma2": WINDOW | {"attn_logit_softcapping": 2.0},
    "gemma3_text": WINDOW,
    "gemma4_text": WINDOW
    | {"vocab_size_per_layer_input": 488, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    "gpt_oss": WINDOW | LOCAL,
    "deepseek_v2": ROUTED | MLA,
    "deepseek_v3": ROUTED | MLA,
    "llama4_text": LOCAL
    | {"num_experts_per_tok": 1, "attention_chunk_size": 8, "intermediate_size_mlp": 48, "moe_layers": [1, 3]}
    | {"floor_scale": 4},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "granitemoehybrid": LOCAL | MAMBA | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    },
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "olmo3": WINDOW,
    "olmo_hybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "smollm3": {},
    "phi3": {},
    "glm4": {},
    "glm4_moe": ROUTED | {"n_group": 1, "topk_group": 1},
    "minimax_m2": LOCAL,
    "ernie4_5": {},
    "exaone4": WINDOW,
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "cohere": {"logit_scale": 0.25},
}

USUAL = {"qwen3_5_text", "gpt_oss", "deepseek_v3", "gemma2", "gemma4_text", "llama4_text", "lfm2"}
"""Architectures that are tested by default. The others are tested every night."""

PAGE = Path(__file__).parents[4] / "docs/reference/models.md"


def stated() -> dict[str, dict[str, str]]:
    """Return the cells of the page's table by architecture and column."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    header, *rows = [row for row in table if len(row) == len(table[0])]
    return {row[0].strip("`"): dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def each_architecture(usual: Collection[str] = USUAL) -> pytest.MarkDecorator:
    """Run a test for the `usual` architectures by default, and for the others every night."""
    names = [name if name in usual else pytest.param(name, marks=pytest.mark.nightly) for name in ARCHITECTURES]
    return pytest.mark.parametrize("name", names)


def tiny_config(model_type: str, tokenizer: PreTrainedTokenizerBase, **sizes: int) -> PreTrainedConfig:
    """Return the tiny configuration of an architecture, with the special tokens of a tokenizer.

    `sizes` replace `SIZES`.
    """
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**SIZES | sizes | ARCHITECTURES[model_type] | tokens)
    return config
