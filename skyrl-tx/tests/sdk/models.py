"""Tiny random models with a tokenizer, in folders, and what Hugging Face computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from tx_tiny_models import new_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""The third is the one that ends sequences of the models."""
SHARPNESS = 4
"""Of what models say. They cannot add to it where the head is the embedding, whose adapter there is none of."""
N_DATA, N_TOKENS = 6, 15


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and the special ones."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])


def save(family: str, folder: Path) -> None:
    """As a user would have downloaded it."""
    tokenizer = new_tokenizer()
    model = new_model(family, vocab_size=len(tokenizer))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SHARPNESS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def reference(folder: Path) -> list[dict[str, Any]]:
    """Data, and the log-probs of their targets."""
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
