"""Workloads of `make bench-rollout`: conversations of random tokens with fixed lengths."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

CONTEXT = 4096  # tokens
FIRST_TOKEN, LAST_TOKEN = 10, 500  # of prompts; no special tokens


@dataclass(frozen=True)
class Conversation:
    """A prompt, and turns of `n_new` sampled tokens followed by `observation_ids`."""

    prompt_ids: list[int]
    turns: list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model with attention heads of 64 dimensions, two of them for keys and values."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int

    def qwen3(self) -> PreTrainedModel:
        """Return a model with attention in all layers."""
        return self._create(Qwen3Config(**vars(self), **self._common))

    def qwen3_5(self) -> PreTrainedModel:
        """Return a model with attention in every fourth layer, and recurrent states in all other layers."""
        heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 4}
        dimensions = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        return self._create(Qwen3_5TextConfig(**vars(self), **self._common, **heads, **dimensions))

    @property
    def _common(self) -> dict[str, Any]:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        others = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return heads | others | {"intermediate_size": 3 * self.hidden_size, "max_position_embeddings": CONTEXT}

    @staticmethod
    def _create(config: PreTrainedConfig) -> PreTrainedModel:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model.eval()


SMALL = Sizes(vocab_size=8192, hidden_size=256, num_hidden_layers=4)
LARGE_VOCABULARY = Sizes(vocab_size=151_936, hidden_size=128, num_hidden_layers=2)


@dataclass(frozen=True)
class Workload:
    """Concurrent conversations with models of one size."""

    name: str
    sizes: Sizes
    conversations: list[Conversation]
    goal: float  # the required speed-up over `generate`

    @property
    def n_tokens(self) -> int:
        """Number of requested tokens."""
        return sum(n_new for conversation in self.conversations for n_new, _ in conversation.turns)


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
        Workload("mixed lengths, 8 to 256", SMALL, mixed, 1.5),
        Workload("ten turns, 160 tokens observed after each", SMALL, chats, 4),
        Workload("ten turns, 320 tokens observed after each", SMALL, tool_use, 4),
        Workload("groups of 16, prompts of 1,024", SMALL, groups, 3),
        Workload("vocabulary of 151,936", LARGE_VOCABULARY, large, 4),
    ]
