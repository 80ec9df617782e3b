"""Estimates of a model's memory, and the default size of a micro-batch."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

MAX_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Maximum of the default number of tokens per pass. More tokens are no faster."""

MIN_TOKENS = 1024
"""Minimum of the same default, for any model. With fewer tokens, most time goes into adding up weight gradients."""

MAX_ACTIVATION_BYTES = 1 << 30
"""Default memory for activations on a CPU."""

CACHE_UNIT = 64  # tokens to which the embedded engine rounds up a sequence's part of the key-value cache


def default_max_tokens(config: PretrainedConfig, device: torch.device) -> int:
    """Return the default of `trainer.max_tokens_per_microbatch` for a model on a device."""
    if device.type != "cpu":
        return MAX_TOKENS["cuda"]
    return max(MIN_TOKENS, min(MAX_TOKENS["cpu"], MAX_ACTIVATION_BYTES // activation_bytes_per_token(config)))


def activation_bytes_per_token(config: PretrainedConfig, *, checkpointing: bool = False, value_bytes: int = 4) -> int:
    """Estimate the activation bytes per token that a forward pass keeps for the backward pass.

    A layer keeps two residual states and two norm outputs (H each), in the MLP the gate, its activation, the other
    projection and their product (I each), and in attention the inputs of the norms of queries and keys, what the
    rotary embedding makes of both, the values and the output: 4·H + 4·I + 3·Q + 3·K values. With `checkpointing`, it
    keeps its input, and the backward pass recomputes one layer at a time.
    """
    layers = _layers(config)
    kept = [4 * layer.hidden_size + 4 * _mlp_size(layer) + 3 * _queries(layer) + 3 * _keys(layer) for layer in layers]
    if checkpointing:
        return value_bytes * (sum(int(layer.hidden_size) for layer in layers) + max(kept))
    return value_bytes * sum(kept)


def pass_bytes_per_token(config: PretrainedConfig, *, value_bytes: int = 4) -> int:
    """Estimate the bytes per token of the largest values inside one layer, which exist only while it computes."""
    sizes = [4 * layer.hidden_size + 3 * _mlp_size(layer) + 2 * _queries(layer) for layer in _layers(config)]
    return value_bytes * max(sizes)


def _layers(config: PretrainedConfig) -> list[Any]:
    """Return the configuration of each layer. Heads may differ by layer, as in Gemma 4."""
    text = config.get_text_config()
    return list(getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers)


def _mlp_size(layer: Any) -> int:
    """Return the MLP's inner size for one token: in a mixture of experts, of all experts that compute the token."""
    size = int(getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size)
    n_experts = getattr(layer, "num_experts_per_tok", None)
    return int(getattr(layer, "moe_intermediate_size", None) or size) * n_experts if n_experts else size


def _head_size(layer: Any) -> int:
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def _queries(layer: Any) -> int:
    """Return the values of one token's queries in a layer."""
    return int(layer.num_attention_heads * _head_size(layer))


def _keys(layer: Any) -> int:
    """Return the values of one token's keys in a layer."""
    return int((getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads) * _head_size(layer))


def cache_bytes_per_token(model: PreTrainedModel, *, bf16: bool = False) -> int:
    """Return the KV-cache bytes of one token, in the dtype that the model computes in (`loading.autocast`)."""
    dtype = torch.bfloat16 if bf16 and model.device.type == "cuda" else model.dtype
    return config_cache_bytes_per_token(model.config, dtype)


def config_cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the KV-cache bytes of one token, for a model that is not loaded."""
    n_shared = getattr(config.get_text_config(), "num_kv_shared_layers", None) or 0
    layers = _layers(config)
    return int(sum(2 * _keys(layer) for layer in layers[: len(layers) - n_shared]) * dtype.itemsize)
