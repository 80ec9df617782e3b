"""Workloads of `make bench-rollout`: conversations of random tokens with fixed lengths."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 4096  # tokens
FIRST_TOKEN, LAST_TOKEN = 10, 500  # of prompts; no special tokens


@dataclass(frozen=True)
class Conversation:
    """A prompt, and turns of `n_new` sampled tokens followed by `observation_ids`."""

    prompt_ids: list[int]
    turns: list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Workload:
    """Concurrent conversations with one model."""

    name: str
    model: Callable[[], PreTrainedModel]
    conversations: list[Conversation]
    goal: float  # the required speed-up over `generate`

    @property
    def n_tokens(self) -> int:
        """Number of requested tokens."""
        return sum(n_new for conversation in self.conversations for n_new, _ in conversation.turns)


def small_model() -> PreTrainedModel:
    """Return a model with four layers and a vocabulary of 8,192."""
    return _qwen3(vocab_size=8192, hidden_size=256, num_hidden_layers=4)


def large_vocabulary() -> PreTrainedModel:
    """Return a model with two layers and Qwen3's vocabulary."""
    return _qwen3(vocab_size=151_936, hidden_size=128, num_hidden_layers=2)


def workloads() -> list[Workload]:
    """Return the workloads. They resemble agent training."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(n)]

    mixed = [Conversation(tokens(rng.randint(8, 128)), [(rng.randint(8, 256), [])]) for _ in range(64)]
    chats, tool_use = (
        [Conversation(tokens(128), [(24, tokens(n_observed)) for _ in range(10)]) for _ in range(16)]
        for n_observed in (160, 320)
    )
    prompts = [tokens(1024) for _ in range(4)]
    groups = [Conversation(prompt, [(32, [])]) for prompt in prompts for _ in range(16)]
    large = [Conversation(tokens(32), [(32, [])]) for _ in range(64)]
    return [
        Workload("mixed lengths, 8 to 256", small_model, mixed, 1.5),
        Workload("ten turns, 160 tokens observed after each", small_model, chats, 4),
        Workload("ten turns, 320 tokens observed after each", small_model, tool_use, 4),
        Workload("groups of 16, prompts of 1,024", small_model, groups, 3),
        Workload("vocabulary of 151,936", large_vocabulary, large, 4),
    ]


def _qwen3(vocab_size: int, hidden_size: int, num_hidden_layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).eval()
