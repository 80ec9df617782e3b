from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

SMALL = {
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
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=2.0, sliding_window=64),
    "granite": GraniteConfig(**SMALL, logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "mistral": MistralConfig(**SMALL, sliding_window=64),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3),
}
