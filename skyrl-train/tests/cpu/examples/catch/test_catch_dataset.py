import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.catch.catch_dataset import CatchDataset, main
from examples.catch.env import CatchEnv, CatchReward
from examples.catch.prompt import parse_state

SMALL = ["--train_size", "30", "--test_size", "10"]


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_the_command_writes_both_splits_and_prints_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new/catch"
    main(["--output_dir", str(folder), *SMALL])
    (line,) = capsys.readouterr().out.splitlines()
    assert f"30 train rows to {folder}/train.parquet (optimal catch rate" in line
    assert f"10 validation rows to {folder}/validation.parquet (optimal catch rate" in line
    assert line.endswith("grid 7x6, 5 turns, shaped reward")
    dataset = CatchDataset(train_size=30, test_size=10)
    assert read(folder / "train.parquet") == dataset.train_rows()
    assert read(folder / "validation.parquet") == dataset.validation_rows()


def test_every_row_has_the_game_and_the_reward_of_the_flags(tmp_path: Path) -> None:
    grid = ["--grid_w", "9", "--grid_h", "4", "--max_turns", "8"]
    reward = ["--reward_mode", "episodic", "--step_penalty", "-0.5", "--terminal_catch", "2", "--terminal_miss", "-3"]
    main(["--output_dir", str(tmp_path), *SMALL, *grid, *reward])
    for row in read(tmp_path / "train.parquet"):
        env = CatchEnv({}, row)
        assert parse_state(row["prompt"][-1]["content"]) == env.state
        assert env.max_turns == 8
        assert env.reward == CatchReward("episodic", -0.5, 2.0, -3.0)


def test_games_depend_on_the_seed_and_the_splits_use_consecutive_seeds() -> None:
    same = CatchDataset(train_size=30, test_size=30, seed=7)
    other = CatchDataset(train_size=30, seed=8).train_rows()
    assert CatchDataset(train_size=30, seed=7).train_rows() == same.train_rows() != other
    starts = [
        [(row["extra_info"]["ball_x"], row["extra_info"]["paddle_x"]) for row in rows]
        for rows in (same.validation_rows(), other)
    ]
    assert starts[0] == starts[1]
    assert {(row["extra_info"]["split"], row["extra_info"]["seed"]) for row in same.validation_rows()} == {
        ("validation", 8)
    }
    rows = CatchDataset(grid_w=3, train_size=500).train_rows()
    assert len({(row["extra_info"]["ball_x"], row["extra_info"]["paddle_x"]) for row in rows}) == 9, "every start"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_turns", "4"], "max_turns=4 ends every game before the ball lands, .* max_turns of at least 5"),
        (["--grid_h", "9", "--max_turns", "5"], "max_turns=5 .* grid_h=9 needs max_turns of at least 8"),
        (["--grid_w", "1"], "grid_w=1 leaves nothing to decide; use 2 or more"),
        (["--grid_h", "1"], "grid_h=1 leaves the ball no row to fall; use 2 or more"),
        (["--train_size", "-5"], "train_size=-5 must be at least 1"),
        (["--test_size", "0"], "test_size=0 must be at least 1"),
        (["--terminal_catch", "nan"], "terminal_catch=nan must be a finite number"),
        (["--reward_mode", "sparse"], "invalid choice: 'sparse'"),
    ],
)
def test_invalid_flags_are_refused(flags: list[str], message: str, refuse: Any) -> None:
    assert re.search(message, refuse(main, *flags))
