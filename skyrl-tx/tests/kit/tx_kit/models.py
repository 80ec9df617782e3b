"""Tiny random models in folders of Hugging Face: one for each family, and a minimal one."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 96
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Special tokens; the third is the models' EOS token."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen3", "llama", "qwen3_moe")


def with_families(*names: str) -> pytest.MarkDecorator:
    """Run a test for these families, and every night for the others."""
    params = [name if name in names else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
    return pytest.mark.parametrize("family", params, indirect=True)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte and the special ones."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=CHAT_TEMPLATE
    )


def new_model(family: str, *, vocab_size: int = VOCABULARY, head_dim: int = 16, n_layers: int = 2) -> PreTrainedModel:
    """Return a random model with non-trivial norms, and weights large enough for distinct logits."""
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": vocab_size, "head_dim": head_dim, "num_hidden_layers": n_layers}
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, rope_parameters=LLAMA_ROPE))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=False))
    return _perturb(model, 0.05)


def save_chat_model(family: str, folder: Path, *, sharpness: float = 1.0, n_layers: int = 2) -> None:
    """Save a model with a tokenizer, as users download it. Logits are `sharpness` times as distinct."""
    tokenizer = new_tokenizer()
    model = new_model(family, vocab_size=len(tokenizer), n_layers=n_layers)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MINIMAL_VOCABULARY, MINIMAL_CONTEXT = 64, 128


def save_minimal_model(folder: Path, vocab_size: int = MINIMAL_VOCABULARY) -> None:
    """Save a model with one layer and 128 positions, whose programs compile fast, and a tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": MINIMAL_CONTEXT, "eos_token_id": 2}
    _perturb(Qwen3ForCausalLM(Qwen3Config(**sizes, **shape, **heads)), 0.1).save_pretrained(folder)
    Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}, "t0")).save(str(folder / "tokenizer.json"))


def _perturb(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()
