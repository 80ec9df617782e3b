r"""A tiny model learns to make legal moves in tic-tac-toe and connect four.

    python -m examples.openspiel.learn --seed 42

At the start, it knows only the format: it writes ``\boxed{…}`` around any move of either game, for either player, in
any position. A move is legal if it belongs to this game and puts the current player's piece on a free cell. Legal moves
are also numbered, and the model may discover that a number is accepted. The validation positions do not occur in
training. Exit status 1 means that the model did not learn.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.learning import Recipe, main
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig

GAMES = ["tic_tac_toe", "connect_four"]
N_PLAYED = (4, 5, 6, 7)  # random moves before a position, so either player may be next
N_TASKS, N_HELD_OUT = 400, 40  # per game and number of moves
MOVES = [f"{sign}({row},{column})" for sign in "xo" for row in range(3) for column in range(3)]
MOVES += [f"{sign}{column}" for sign in "xo" for column in range(7)]


def write_data(folder: Path) -> None:
    """Write positions after some random moves. No position is in both files."""
    rows = [row for n_played in N_PLAYED for row in _rows(n_played)]
    held_out = {_position(row): row for i, row in enumerate(rows) if i % N_TASKS < N_HELD_OUT}
    train = [row for row in rows if _position(row) not in held_out]
    folder.mkdir(parents=True, exist_ok=True)
    for name, split_rows in (("train", train), ("validation", list(held_out.values()))):
        pq.write_table(pa.Table.from_pylist(split_rows), folder / f"{name}.parquet")


def _rows(n_played: int) -> Iterable[dict[str, Any]]:
    options = {"cases": GAMES, "reward_mode": "legal", "max_random_steps": n_played, "num_tasks_per_case": N_TASKS}
    tasks = OpenSpielTasks(TaskConfig.from_options(options))
    return tasks.rows(range(tasks.total))


def _position(row: dict[str, Any]) -> str:
    return str(row["prompt"][-1]["content"])


def attempt(row: dict[str, Any], rng: random.Random) -> ConversationType:
    """Return the position with an arbitrary move as its answer."""
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
    chance=0.18,
    n_steps=40,
    context_length=320,
)

if __name__ == "__main__":
    main(RECIPE, __doc__ or "")
