"""Models of architectures other than that of the tiny model."""

from __future__ import annotations

import pytest
import torch
from small_models import SMALL
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
)

from skyrl_train.models.loading import load_model

OTHER_ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=2.0, attn_logit_softcapping=None, sliding_window=64),
    "granite": GraniteConfig(**SMALL, logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "mistral": MistralConfig(**SMALL, sliding_window=64),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3),
}


@pytest.fixture(scope="session", params=sorted(OTHER_ARCHITECTURES))
def other_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Models of architectures other than Qwen3, with random weights and 61 tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(OTHER_ARCHITECTURES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
