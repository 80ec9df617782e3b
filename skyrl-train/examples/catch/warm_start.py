"""Make a tiny Qwen3 that knows the form of Catch, but not how to play it.

    python -m examples.catch.warm_start --data_dir ~/data/catch --output_dir ~/models/catch-tiny

Trains a tokenizer and a language model on conversations of *random* play: the model learns to read the board, to
answer with one letter, and what the board looks like afterwards. It sees no rewards and no good play; that a ball
should be caught is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from examples.catch.players import conversation, random_player
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_train.dataset.files import read_rows
from skyrl_train.entrypoints.command import compute_thread, log_to_console
from skyrl_train.errors import SkyRLError
from skyrl_train.models.tiny import tiny_qwen3, train_tokenizer

N_CONVERSATIONS = 4096
N_STEPS = 150
BATCH_SIZE = 64
LEARNING_RATE = 3e-3


def make_model(train_file: Path, output_dir: Path, seed: int) -> float:
    """Write tokenizer and model to `output_dir`, which must be new; returns the last loss in nats per token."""
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists already; remove it, or write to another folder")
    rows = read_rows(str(train_file))
    conversations = play_at_random(rows, N_CONVERSATIONS, seed)
    tokenizer = train_tokenizer(conversations[:400])
    model = tiny_qwen3(tokenizer, seed=seed)
    loss = train_language_model(model, encode(conversations, tokenizer), seed)
    partial = output_dir.with_name(output_dir.name + ".partial")  # an interrupted write is not mistaken for a model
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(output_dir)
    return loss


def play_at_random(rows: Sequence[dict[str, Any]], n_games: int, seed: int) -> list[ConversationType]:
    """Whole conversations of a player that answers L, R or S by chance."""
    player, order = random_player(seed), random.Random(seed)
    return [conversation(row, player) for row in order.choices(rows, k=n_games)]


def encode(conversations: Sequence[ConversationType], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Token ids (n, L), padded on the right with -100."""
    texts = tokenizer.apply_chat_template(list(conversations), tokenize=False)
    token_ids = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    return torch.nn.utils.rnn.pad_sequence(token_ids, batch_first=True, padding_value=-100)


def train_language_model(model: PreTrainedModel, token_ids: torch.Tensor, seed: int) -> float:
    """Next-token prediction over every token of the conversations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=N_STEPS // 20, num_training_steps=N_STEPS)
    generator = torch.Generator().manual_seed(seed)

    def step() -> float:
        batch = token_ids[torch.randint(len(token_ids), (BATCH_SIZE,), generator=generator)]  # (b, L)
        logits = model(input_ids=batch.clamp(min=0), use_cache=False).logits[:, :-1]  # (b, L - 1, V)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    with compute_thread() as compute, trange(N_STEPS, desc="warm start on random play", disable=None) as progress:
        for _ in progress:
            last_loss = compute.submit(step).result()
            progress.set_postfix(loss=f"{last_loss:.3f}", refresh=False)
    return last_loss


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder that catch_dataset wrote")
    parser.add_argument("--output_dir", type=Path, required=True, help="where the Hugging Face folder goes")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    log_to_console()
    output_dir = args.output_dir.expanduser()
    try:
        loss = make_model(args.data_dir.expanduser() / "train.parquet", output_dir, args.seed)
    except (ValueError, SkyRLError) as error:
        parser.error(str(error))
    print(f"Wrote a tiny Qwen3 to {output_dir} (loss on random play: {loss:.3f} nats per token)")


if __name__ == "__main__":
    main()
