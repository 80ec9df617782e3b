"""Small models of other architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}

ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
"""Name of the buffer of `new_biased_router`."""


def new_biased_router(folder: Path, *, seed: int = 0) -> Path:
    """Save a mixture of experts whose router has a bias that is a buffer, and large enough to choose the experts."""
    torch.manual_seed(seed)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**SMALL, **experts, n_group=1, topk_group=1))
    model.get_buffer(ROUTER_BIAS).copy_(torch.tensor([1.0, -1.0, 2.0, 0.5]).roll(seed))
    model.save_pretrained(folder)
    return folder
