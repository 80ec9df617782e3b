import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gym_kit.games import position
from gym_kit.messages import user

from skyrl_gym.envs.openspiel.cases import load_game
from skyrl_gym.envs.openspiel.states import draw_position, serialize
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig, read_task

TWO_CASES = {"cases": ["hex(board_size=5)", "leduc_poker"], "num_tasks_per_case": 3, "seed": 10}


def test_task_id_determines_case_seed_and_seat() -> None:
    tasks = OpenSpielTasks(TWO_CASES)
    assert tasks.total == len(tasks) == 6
    for task_id in range(6):
        task = tasks.generate(task_id)
        case = ["hex(board_size=5)", "leduc_poker"][task_id // 3]
        assert (task.task_id, task.case) == (task_id, case)
        assert task.state.history() == draw_position(load_game(case), 10 + task_id % 3, 4).history()
        assert tasks.generate(task_id + 6).facts == tasks.generate(task_id - 6).facts == task.facts  # ids wrap around
    options = {"cases": ["goofspiel(num_cards=8)"], "num_tasks_per_case": 4}
    assert [OpenSpielTasks(options).generate(k).player for k in range(4)] == [0, 1, 0, 1]
    assert [OpenSpielTasks(options | {"seat": 1}).generate(k).player for k in range(4)] == [1, 1, 1, 1]


def test_row_of_a_task() -> None:
    tasks = OpenSpielTasks(TWO_CASES | {"reward_mode": "legal"})
    (row,) = tasks.rows([4])
    assert row["prompt"] == user(tasks.generate(4).prompt)
    assert (row["env_class"], row["data_source"]) == ("openspiel", "openspiel_leduc_poker")
    assert row["reward_spec"] == {"method": "legal", "ground_truth": ""}
    assert row["extra_info"]["env"] == "openspiel"
    assert row["extra_info"]["legal_actions"][0].keys() == {"id", "text"}
    (row,) = OpenSpielTasks(TWO_CASES).game_rows([0])  # its prompt is the introduction
    assert row["env_class"] == "openspiel_game"
    assert row["prompt"][0]["content"].startswith("Game: hex(board_size=5)\n")
    assert "Legal actions" not in row["prompt"][0]["content"]


def test_rows_survive_parquet(tmp_path: Path) -> None:
    tasks = OpenSpielTasks({"num_tasks_per_case": 1})
    rows = tasks.rows(range(tasks.total)) + tasks.game_rows(range(tasks.total))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    frame = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert frame == rows
    for row in frame[: tasks.total]:
        assert read_task(row["extra_info"], TaskConfig()).prompt == row["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"serialized_game_and_state": None, "task_id": None}, "neither serialized_game_and_state nor task_id"),
        ({"task_id": "four"}, "task_id='four' must be a whole number"),
        ({"current_player": 1}, "current_player=1, but its state has player 0 to move"),
        ({"legal_actions": [[0, "a1"]]}, r"lists the legal actions \[0\], but its state has"),
    ],
)
def test_inconsistent_row_is_refused(change: dict[str, Any], message: str) -> None:
    facts = OpenSpielTasks(TWO_CASES).generate(0).facts | change
    with pytest.raises(ValueError, match=message):
        read_task({key: value for key, value in facts.items() if value is not None}, TaskConfig())


def test_finished_games_and_chance_events_are_refused() -> None:
    for actions in ((), (0, 1, 2, 0)):  # no cards yet; two cards, a raise, a fold
        state = position("leduc_poker", *actions)
        with pytest.raises(ValueError, match="is not a decision of a player"):
            read_task({"serialized_game_and_state": serialize(state.get_game(), state)}, TaskConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_mode": "win"}, "reward_mode='win' is unknown; use one of outcome, legal"),
        ({"n_playouts": 0}, "n_playouts=0 must be at least 1"),
        ({"max_random_steps": -1}, "max_random_steps=-1 must be at least 0"),
        ({"num_tasks_per_case": 1.5}, "num_tasks_per_case=1.5 must be a whole number"),
        ({"cases": ["hex"], "seat": 2}, "seat=2, but the case 'hex' has 2 players"),
        ({"cases": ["2048(max_tile=0)"]}, "returns cannot be scaled"),
    ],
)
def test_invalid_config_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenSpielTasks(options)


def test_game_types_default_to_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_TYPES", "chess, checkers")
    assert TaskConfig.from_options({}).cases == ("chess", "checkers")
    assert TaskConfig.from_options({"game_types": ["othello"]}).cases == ("othello",)
    assert TaskConfig.from_options({"num_tasks_per_game": 7}).num_tasks_per_case == 7  # an alias


def test_identical_tasks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    options = {"cases": ["hex", "leduc_poker"], "max_random_steps": 0}
    with caplog.at_level(logging.WARNING):
        tasks = OpenSpielTasks(options)
    (record,) = caplog.records
    assert "All 100 tasks of hex are the same position" in record.getMessage()
    assert len({tasks.generate(k).prompt for k in range(100)}) == 1
    assert len({tasks.generate(100 + k).facts["serialized_game_and_state"] for k in range(100)}) > 10
    caplog.clear()
    OpenSpielTasks(options | {"num_tasks_per_case": 1})
    assert not caplog.records
