"""Write an OpenSpiel dataset: game positions with the task to choose a move.

    python -m examples.openspiel.openspiel_dataset --output_dir ~/data/openspiel --cases "hex(board_size=5),othello"

There are no raw rows: positions are generated with `--seed`, by random moves from the start of each game. No position
is in both files. With `--whole_games`, the model plays each game to its end. The script needs the package open_spiel:
``pip install -c ../constraints.txt -e '../skyrl-gym[openspiel]'`` in `skyrl-train/`.
"""

import argparse
from collections.abc import Sequence

import pyarrow as pa

from examples.prepare import Preparation, command_line, field, prepare, prompt_field, row_schema
from skyrl_gym.data.files import Row
from skyrl_gym.envs.openspiel.rewards import REWARD_MODES
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig
from skyrl_train.errors import DataError

SCHEMA = row_schema(
    {
        "env": pa.string(),
        "serialized_game_and_state": pa.string(),
        "game_short_name": pa.string(),
        "case": pa.string(),
        "legal_actions": pa.list_(pa.struct({"id": pa.int64(), "text": pa.string()})),
        "current_player": pa.int64(),
        "task_id": pa.int64(),
        "num_players": pa.int64(),
        "seed": pa.int64(),
    }
)


def dataset_row(raw: Row, split: str, index: int) -> Row:
    """Return an `OpenSpielTasks` row with its split."""
    facts = field(raw, "extra_info", dict)
    field(facts, "serialized_game_and_state", str)
    return raw | {"prompt": prompt_field(raw), "extra_info": facts | {"split": split}}


def position(row: Row) -> str:
    """Return a task's identity: its game and position."""
    return str(row["extra_info"]["serialized_game_and_state"])


def positions(args: argparse.Namespace, seed: int) -> list[Row]:
    """Return the rows requested by the flags. Raise DataError if there are none."""
    options = {
        "cases": args.cases,
        "num_tasks_per_case": args.num_tasks_per_case,
        "max_random_steps": args.max_random_steps,
        "reward_mode": args.reward_mode,
        "seed": seed,
    }
    try:
        tasks = OpenSpielTasks(TaskConfig.from_options(options))
        return (tasks.game_rows if args.whole_games else tasks.rows)(range(tasks.total))
    except (ImportError, ValueError) as error:
        raise DataError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "openspiel", default_source="sample")
    add = parser.add_argument
    add("--cases", help="comma-separated games; %(default)s means all games suggested by the environment")
    add("--num_tasks_per_case", type=int, default=100, help="positions per game")
    add("--max_random_steps", type=int, default=4, help="maximum number of random moves before a position")
    add("--reward_mode", choices=REWARD_MODES, default="outcome", help="reward of single moves")
    add("--whole_games", action="store_true", help="play to the end instead of one move")
    args = parser.parse_args(argv)

    def sample(seed: int) -> list[Row]:
        return positions(args, seed)

    prepare(Preparation(SCHEMA, dataset_row, sample, identity=position), parser, args)


if __name__ == "__main__":
    main()
