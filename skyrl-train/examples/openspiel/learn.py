r"""A tiny model learns to make legal moves in tic-tac-toe and connect four.

    python -m examples.openspiel.learn --seed 42

It starts with the form only: it writes ``\boxed{…}`` around any move of either game, for either player, wherever the
game stands. A legal move is one of this game, of the player whose turn it is, to a place that is free. Validation has
positions that training has not. The exit status is 1 if it did not learn.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.learning import Recipe, main
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig

N_TRAIN, N_VALIDATION = 1500, 150  # positions of each game
TASKS = {"cases": ["tic_tac_toe", "connect_four"], "reward_mode": "legal", "max_random_steps": 6}
MOVES = [f"{sign}({row},{column})" for sign in "xo" for row in range(3) for column in range(3)]
MOVES += [f"{sign}{column}" for sign in "xo" for column in range(7)]


def write_data(folder: Path) -> None:
    """Positions after some random moves; none is in both files."""
    n = N_TRAIN + N_VALIDATION
    tasks = OpenSpielTasks(TaskConfig.of(TASKS | {"num_tasks_per_case": n}))
    rows = list(tasks.rows(range(tasks.total)))
    held_out = {str(row["prompt"]) for row in rows[N_TRAIN:n] + rows[n + N_TRAIN :]}
    folder.mkdir(parents=True, exist_ok=True)
    train = [row for row in rows if str(row["prompt"]) not in held_out]
    for name, some in (("train", train), ("validation", [row for row in rows if str(row["prompt"]) in held_out])):
        pq.write_table(pa.Table.from_pylist(some), folder / f"{name}.parquet")


def attempt(row: dict[str, Any], rng: random.Random) -> ConversationType:
    """A position, and any move."""
    return [*row["prompt"], {"role": "assistant", "content": f"\\boxed{{{rng.choice(MOVES)}}}"}]


RECIPE = Recipe(
    name="openspiel",
    write_data=write_data,
    attempt=attempt,
    overrides=(
        "trainer.train_batch_size=64",
        "trainer.policy_mini_batch_size=16",
        "generator.n_samples_per_prompt=8",
        "generator.sampling_params.max_generate_length=12",
        "trainer.eval_batch_size=1024",
    ),
    metric="eval/environment/legal",
    required=0.95,
    chance=0.17,
    n_steps=60,
    context_length=320,
)

if __name__ == "__main__":
    main(RECIPE, __doc__ or "")
