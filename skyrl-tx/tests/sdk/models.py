"""Tiny random models with a tokenizer, and reference results of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from tx_kit.models import SPECIAL, new_model, new_tokenizer

SHARPNESS = 4
"""Scale of the weights, for distinct logits: a tied head has no adapter to sharpen them."""
N_DATA, N_TOKENS = 6, 15


def save(family: str, folder: Path) -> None:
    """Save a model as users download it."""
    tokenizer = new_tokenizer()
    model = new_model(family, vocab_size=len(tokenizer))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SHARPNESS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def reference(folder: Path) -> list[dict[str, Any]]:
    """Return data and the log-probs of their targets."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(1)
    tokens = torch.randint(len(SPECIAL), model.config.vocab_size, (N_DATA, N_TOKENS + 1))
    weights = torch.rand(N_DATA, N_TOKENS)
    with torch.no_grad():
        logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return [
        {"tokens": row[:-1].tolist(), "targets": row[1:].tolist(), "weights": w.tolist(), "logprobs": lp.tolist()}
        for row, w, lp in zip(tokens, weights, logprobs, strict=True)
    ]
