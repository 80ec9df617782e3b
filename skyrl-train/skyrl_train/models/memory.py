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


def activation_bytes_per_token(config: PretrainedConfig, *, checkpointing: bool = False, value_bytes: int = 4) -> int:
    """Estimate the activation bytes per token that a forward pass keeps for the backward pass.

    A layer keeps two residual states and two norm outputs (H each), in the MLP the gate, its activation, the other
    projection and their product (I each), and in attention the queries, keys and values before and after the rotary
    embedding and the output: 4·H + 4·I + 4·Q + 5·K values. With `checkpointing`, it keeps its input, and the backward
    pass recomputes one layer at a time.
    """
    config = config.get_text_config()
    per_layer = 4 * config.hidden_size + 4 * _mlp_size(config) + 4 * _head_values(config) + 5 * _key_values(config)
    if checkpointing:
        return value_bytes * (config.num_hidden_layers * config.hidden_size + per_layer)
    return value_bytes * config.num_hidden_layers * per_layer


def pass_bytes_per_token(config: PretrainedConfig, *, value_bytes: int = 4) -> int:
    """Estimate the bytes per token of the largest values inside one layer, which exist only while it computes."""
    config = config.get_text_config()
    return value_bytes * (4 * config.hidden_size + 3 * _mlp_size(config) + 2 * _head_values(config))


def _mlp_size(config: PretrainedConfig) -> int:
    """Return the MLP's inner size for one token: in a mixture of experts, of all experts that compute the token."""
    size = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    n_experts = getattr(config, "num_experts_per_tok", None)
    return int(getattr(config, "moe_intermediate_size", None) or size) * n_experts if n_experts else size


def _head_size(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _head_values(config: PretrainedConfig) -> int:
    """Return the values of one token's queries in a layer."""
    return int(config.num_attention_heads * _head_size(config))


def _key_values(config: PretrainedConfig) -> int:
    """Return the values of one token's keys in a layer."""
    return int((getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * _head_size(config))


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
        n_values += 2 * _key_values(layer)
    return int(n_values * dtype.itemsize)
