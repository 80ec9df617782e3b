"""Models small enough to create in a test: the tiny Qwen3 with its tokenizer, and other architectures."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from examples.catch.catch_dataset import CatchDataset
from examples.catch.players import conversation, random_player
from skyrl_train.entrypoints.tiny import tiny_qwen3, train_tokenizer
from skyrl_train.models.loading import load_model

CPU = torch.device("cpu")

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
"""Sizes of models of other architectures than the tiny one."""

SMALL_GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}

OTHER_ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=2.0, attn_logit_softcapping=None, sliding_window=64),
    "granite": GraniteConfig(**SMALL, logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25, bos_token_id=None, eos_token_id=None),
    "mistral": MistralConfig(**SMALL, sliding_window=64),
    "gpt2": GPT2Config(**SMALL_GPT2, n_positions=128),
}

_LONG = SMALL | {"max_position_embeddings": 512}
PREFIX_SHARING_ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_LONG),
    "qwen2": Qwen2Config(**_LONG),
    "qwen3": Qwen3Config(**_LONG),
    "qwen3_moe": Qwen3MoeConfig(**_LONG, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "gemma": GemmaConfig(**_LONG),
    "mistral": MistralConfig(**_LONG, sliding_window=5),
    "gpt2": GPT2Config(**SMALL_GPT2, n_positions=512),
}
"""Architectures whose rows can share prefixes, so that ranks can divide their tokens."""

PEAKED_VOCABULARY = 10_000
"""Number of tokens from which `save_tiny_model` makes some tokens much likelier than others."""

ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
"""Name of the buffer of `save_biased_router`."""


def train_tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Train a tokenizer of 488 tokens on games of Catch."""
    player = random_player(seed=0)
    return train_tokenizer(conversation(row, player) for row in CatchDataset(train_size=50).train_rows())


def save_tiny_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int = 0,
    head_dim: int = 16,
    context_length: int = 512,
) -> Path:
    """Save a Qwen3 of two layers with a tokenizer as a Hugging Face folder.

    With the default, `train_tiny_tokenizer`, the model has 194,000 parameters.
    """
    tokenizer = tokenizer or train_tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_qwen3(tokenizer, seed=seed, head_dim=head_dim, context_length=context_length)
    if len(tokenizer) > PEAKED_VOCABULARY:
        # Among so many equally likely tokens, rounding would change samples, and no reply would end.
        model.get_output_embeddings().weight.data *= 4
    model.save_pretrained(folder)
    return folder


def create_model(config: PreTrainedConfig, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Create a language model with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    return model


def load_on_cpu(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Load a language model as the trainer does."""
    return load_model(str(folder), dtype=dtype, device=CPU, **options)


def set_context_length(folder: Path, n_tokens: int) -> Path:
    """Change the context length of a saved vision-language model, which has no weights for positions."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["max_position_embeddings"] = n_tokens
    file.write_text(json.dumps(config))
    return folder


def experts_of_vllm(initializer_range: float) -> Qwen3MoeConfig:
    """Return a mixture of experts whose heads have the size that vLLM needs on CPUs."""
    sizes = SMALL | {"vocab_size": 512, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 1024}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return Qwen3MoeConfig(**sizes | experts | {"initializer_range": initializer_range})


def save_biased_router(folder: Path, *, seed: int = 0) -> Path:
    """Save a mixture of experts whose router has a bias that is a buffer, and large enough to choose the experts."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    model = create_model(Glm4MoeConfig(**SMALL, **experts, n_group=1, topk_group=1), seed=seed)
    model.get_buffer(ROUTER_BIAS).copy_(torch.tensor([1.0, -1.0, 2.0, 0.5]).roll(seed))
    model.save_pretrained(folder)
    return folder


def perturbed(model: PreTrainedModel, scale: float, seed: int) -> PreTrainedModel:
    """Return a copy with slightly different weights, as after an update."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other
