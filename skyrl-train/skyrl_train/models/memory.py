"""Estimates of a model's memory, and the default size of a micro-batch."""

import torch
from transformers import PretrainedConfig, PreTrainedModel

MAX_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Maximum of the default number of tokens per pass. More tokens are no faster."""

MIN_TOKENS = 1024
"""Minimum of the same default, for any model. With fewer tokens, most time goes into adding up weight gradients."""

MAX_ACTIVATION_BYTES = 1 << 30
"""Default memory for activations on a CPU."""


def default_max_tokens(config: PretrainedConfig, device: torch.device) -> int:
    """Return the default of `trainer.max_tokens_per_microbatch` for a model on a device."""
    if device.type != "cpu":
        return MAX_TOKENS["cuda"]
    return max(MIN_TOKENS, min(MAX_TOKENS["cpu"], MAX_ACTIVATION_BYTES // activation_bytes_per_token(config)))


def activation_bytes_per_token(config: PretrainedConfig) -> int:
    """Estimate the float32 activation bytes per token that an eager forward pass keeps for the backward pass."""
    config = config.get_text_config()
    size = config.hidden_size
    return int(4 * config.num_hidden_layers * (18 * size + 4 * getattr(config, "intermediate_size", 4 * size)))


def cache_bytes_per_token(model: PreTrainedModel, *, bf16: bool = False) -> int:
    """Return the KV-cache bytes of one token, in the dtype that the model computes in (`loading.autocast`)."""
    dtype = torch.bfloat16 if bf16 and model.device.type == "cuda" else model.dtype
    return config_cache_bytes_per_token(model.config, dtype)


def config_cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the KV-cache bytes of one token, for a model that is not loaded."""
    config = config.get_text_config()
    n_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    # Heads may differ by layer, as in Gemma 4. Older versions of transformers have no such models.
    layers = getattr(config, "per_layer_config", None) or [config] * n_layers
    n_values = 0
    for layer in layers[:n_layers]:
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        n_values += 2 * head_dim * (getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
    return int(n_values * dtype.itemsize)
