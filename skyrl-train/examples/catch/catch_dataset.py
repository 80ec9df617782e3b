"""Write the Catch dataset: games with random starts.

    python -m examples.catch.catch_dataset --output_dir ~/data/catch

writes ``train.parquet`` and ``validation.parquet`` (run it from the folder that contains `examples`). A grid has only
grid_w² starts (49 by default), so both files contain the same games with different frequencies: validation measures
how well the game is played, not generalization.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from examples.catch.env import CatchReward, RewardMode
from examples.catch.game import DEFAULT_GRID_H, DEFAULT_GRID_W, CatchState
from examples.catch.players import catch_rate, optimal_player
from examples.catch.prompt import opening

ROW_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "env_class": pa.string(),
        "reward_spec": pa.struct(
            {
                "mode": pa.string(),
                "step_penalty": pa.float64(),
                "terminal_catch": pa.float64(),
                "terminal_miss": pa.float64(),
            }
        ),
        "extra_info": pa.struct(
            {
                "grid_w": pa.int64(),
                "grid_h": pa.int64(),
                "max_turns": pa.int64(),
                "ball_x": pa.int64(),
                "ball_y": pa.int64(),
                "paddle_x": pa.int64(),
                "split": pa.string(),
                "seed": pa.int64(),
            }
        ),
    }
)


@dataclass(frozen=True, slots=True)
class CatchDataset:
    """The games to generate. Raises ValueError if they could not be played, won or learned.

    max_turns: turns per game. None means as many as the ball needs to land, grid_h - 1.
    seed: seed of the training split. The validation split uses seed + 1.
    """

    grid_w: int = DEFAULT_GRID_W
    grid_h: int = DEFAULT_GRID_H
    max_turns: int | None = None
    train_size: int = 20_000
    test_size: int = 500
    seed: int = 123
    reward: CatchReward = field(default_factory=CatchReward)

    def __post_init__(self) -> None:
        if self.grid_w < 2:
            raise ValueError(f"grid_w={self.grid_w} leaves nothing to decide; use 2 or more")
        if self.grid_h < 2:
            raise ValueError(f"grid_h={self.grid_h} leaves the ball no row to fall; use 2 or more")
        if self.n_turns < self.grid_h - 1:
            raise ValueError(
                f"max_turns={self.max_turns} ends every game before the ball lands, so it can never be caught: "
                f"grid_h={self.grid_h} needs max_turns of at least {self.grid_h - 1}"
            )
        for name in ("train_size", "test_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def n_turns(self) -> int:
        return self.grid_h - 1 if self.max_turns is None else self.max_turns

    def train_rows(self) -> list[dict[str, Any]]:
        return self._rows("train", self.train_size, self.seed)

    def validation_rows(self) -> list[dict[str, Any]]:
        return self._rows("validation", self.test_size, self.seed + 1)

    def _rows(self, split: str, n_rows: int, seed: int) -> list[dict[str, Any]]:
        """Return `n_rows` starts. Ball and paddle are in random columns, the ball in the top row."""
        rng = random.Random(seed)
        starts = (
            CatchState(
                grid_w=self.grid_w,
                grid_h=self.grid_h,
                ball_x=rng.randrange(self.grid_w),
                ball_y=0,
                paddle_x=rng.randrange(self.grid_w),
                turns_left=self.n_turns,
            )
            for _ in range(n_rows)
        )
        return [dataset_row(start, self.reward, split, seed) for start in starts]


def dataset_row(start: CatchState, reward: CatchReward, split: str, seed: int) -> dict[str, Any]:
    """Return a game's row, with the columns of `ROW_SCHEMA`."""
    return {
        "data_source": "synthetic_catch",
        "prompt": opening(start),
        "env_class": "catch",
        "reward_spec": asdict(reward),
        "extra_info": {
            "grid_w": start.grid_w,
            "grid_h": start.grid_h,
            "max_turns": start.turns_left,
            "ball_x": start.ball_x,
            "ball_y": start.ball_y,
            "paddle_x": start.paddle_x,
            "split": split,
            "seed": seed,
        },
    }


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write `rows` as a parquet file, creating its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ROW_SCHEMA), path)


def write_dataset(dataset: CatchDataset, output_dir: Path) -> str:
    """Write both splits. Return a line with their paths, sizes and optimal catch rates."""
    parts = []
    for name, rows in (("train", dataset.train_rows()), ("validation", dataset.validation_rows())):
        path = output_dir / f"{name}.parquet"
        write_rows(rows, path)
        parts.append(f"{len(rows)} {name} rows to {path} (optimal catch rate {catch_rate(rows, optimal_player):.3f})")
    game = f"grid {dataset.grid_w}x{dataset.grid_h}, {dataset.n_turns} turns, {dataset.reward.mode} reward"
    return f"Wrote {' and '.join(parts)}: {game}"


def build_parser() -> argparse.ArgumentParser:
    dataset, reward = CatchDataset(), CatchReward()
    parser = argparse.ArgumentParser(
        prog="python -m examples.catch.catch_dataset",
        description="Write train.parquet and validation.parquet for the Catch example.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("~/data/catch"), help="folder to write to")
    add("--grid_w", type=int, default=dataset.grid_w, help="columns")
    add("--grid_h", type=int, default=dataset.grid_h, help="rows")
    add("--max_turns", type=int, help="turns per game; %(default)s means grid_h - 1, when the ball lands")
    add("--train_size", type=int, default=dataset.train_size, help="rows of train.parquet")
    add("--test_size", type=int, default=dataset.test_size, help="rows of validation.parquet")
    add("--seed", type=int, default=dataset.seed, help="seed of the training starts; validation uses seed + 1")
    add("--reward_mode", choices=get_args(RewardMode), default=reward.mode, help="reward every turn, or only the end")
    add("--step_penalty", type=float, default=reward.step_penalty, help="added every turn in shaped mode")
    add("--terminal_catch", type=float, default=reward.terminal_catch, help="reward of a caught ball")
    add("--terminal_miss", type=float, default=reward.terminal_miss, help="reward of a missed ball")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        reward = CatchReward(args.reward_mode, args.step_penalty, args.terminal_catch, args.terminal_miss)
        dataset = CatchDataset(
            grid_w=args.grid_w,
            grid_h=args.grid_h,
            max_turns=args.max_turns,
            train_size=args.train_size,
            test_size=args.test_size,
            seed=args.seed,
            reward=reward,
        )
    except ValueError as error:
        parser.error(str(error))
    print(write_dataset(dataset, args.output_dir.expanduser()))


if __name__ == "__main__":
    main()
