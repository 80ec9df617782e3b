"""Estimates of the memory that a model takes."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel


def cache_bytes_per_token(model: PreTrainedModel, *, bf16: bool = False) -> int:
    """Return the bytes of the keys and values of one token, in the dtype that the model computes in (`autocast`)."""
    dtype = torch.bfloat16 if bf16 and model.device.type == "cuda" else model.dtype
    return config_cache_bytes_per_token(model.config, dtype)


def config_cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token, of a model that is not loaded."""
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * n_heads * head_dim * dtype.itemsize)
