"""Workloads of `make bench-training`. Both frameworks get the same model and prompts."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.game import CatchState
from examples.catch.prompt import opening
from skyrl_train.entrypoints.tiny import CHAT_TEMPLATE, PAD, TURN_END, TURN_START

N_ROWS = 4096
DIGITS = "0123456789"  # one token each


@dataclass(frozen=True)
class Workload:
    """GRPO steps on `n_prompts` prompts, with `n_samples` samples each, of `n_turns` turns of exactly `n_new` tokens.
    Or steps of supervised fine-tuning on the same `n_prompts` rows with a response of `n_new` tokens.
    """

    name: str
    n_prompts: int
    n_samples: int
    n_prompt_tokens: int
    n_new: int
    hidden_size: int
    vocab_size: int
    n_turns: int = 1
    kl: float = 0.0
    is_sft: bool = False
    lora_rank: int = 0
    trl_rows: int | None = None
    """Rows per micro-batch in TRL. The default is all rows, the fastest choice if memory allows it."""

    n_observed: int = 0
    """Tokens that a turn adds after the sampled tokens."""

    @property
    def n_trajectories(self) -> int:
        """Number of trajectories per step."""
        return self.n_prompts * self.n_samples

    @property
    def n_row_tokens(self) -> int:
        """Number of tokens per trajectory."""
        return self.n_prompt_tokens + self.n_turns * self.n_new + (self.n_turns - 1) * self.n_observed


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", 16, 8, 64, 64, 128, 1024),
        Workload("w1-kl", 16, 8, 64, 64, 128, 1024, kl=0.01),
        Workload("w3", 8, 8, 32, 32, 256, 151_936, trl_rows=8),
        Workload("lora", 16, 8, 64, 64, 128, 1024, lora_rank=32),
        Workload("sft", 128, 1, 64, 64, 128, 1024, is_sft=True),
        Workload("catch", 16, 8, 118, 1, 128, 1024, n_turns=5, n_observed=51),
    )
}


def reward(text: str) -> float:
    """Return a pseudo-random reward in [0, 1) for a response."""
    return crc32(text.encode()) % 1000 / 1000


def write_inputs(workload: Workload, folder: Path) -> None:
    """Write the model to `folder`/model and the prompts to `folder`/train.jsonl or `folder`/train.parquet."""
    tokenizer = word_tokenizer()
    if workload.n_turns > 1:
        write_dataset(CatchDataset(train_size=N_ROWS), folder)
    else:
        n_digits = workload.n_prompt_tokens - len(encode_prompt(tokenizer, [{"role": "user", "content": ""}]))
        rng = random.Random(0)
        n_rows = workload.n_prompts if workload.is_sft else N_ROWS
        contents = ("".join(rng.choices(DIGITS, k=n_digits)) for _ in range(n_rows))
        rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": content}]} for content in contents]
        for row in rows if workload.is_sft else ():
            row["response"] = "".join(rng.choices(DIGITS, k=workload.n_new - 1))  # the EOS token follows
        assert len(encode_prompt(tokenizer, rows[0]["prompt"])) == workload.n_prompt_tokens
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        intermediate_size=3 * workload.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=workload.hidden_size // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with a token per digit and, like a large model's, about one per word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        show_progress=False,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    game = CatchState(grid_w=7, grid_h=6, ball_x=0, ball_y=0, paddle_x=0, turns_left=5)
    tokenizer.train_from_iterator(
        [message["content"] for message in opening(game)] + ["system", "user", "assistant"], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a conversation up to the next reply."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids
