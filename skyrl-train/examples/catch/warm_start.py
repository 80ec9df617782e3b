"""Train a tiny Qwen3 that knows the format of Catch but not how to play it.

    python -m examples.catch.warm_start --data_dir ~/data/catch --output_dir ~/models/catch-tiny

Trains a tokenizer and a language model on games of *random* play. The model learns to read the board, reply with one
letter, and predict how the board changes. It sees neither rewards nor good play, so reinforcement learning must teach
it to catch the ball.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.catch.players import conversation, random_player
from examples.tiny_model import make_tiny_model
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_train.dataset.files import read_rows
from skyrl_train.entrypoints.command import log_to_console
from skyrl_train.errors import SkyRLError

N_CONVERSATIONS = 4096
N_STEPS = 150


def make_model(train_file: Path, output_dir: Path, seed: int) -> float:
    """Train a tokenizer and a model, and save them in a new `output_dir`. Return the last loss in nats per token."""
    conversations = play_at_random(read_rows(str(train_file)), N_CONVERSATIONS, seed)
    return make_tiny_model(conversations, output_dir, seed, n_steps=N_STEPS)


def play_at_random(rows: Sequence[dict[str, Any]], n_games: int, seed: int) -> list[ConversationType]:
    """Play complete games with random replies (L, R or S), and return the conversations."""
    player, order = random_player(seed), random.Random(seed)
    return [conversation(row, player) for row in order.choices(rows, k=n_games)]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, and train and save the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder written by catch_dataset")
    parser.add_argument("--output_dir", type=Path, required=True, help="Hugging Face folder to write")
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
