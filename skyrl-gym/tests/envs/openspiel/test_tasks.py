from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_gym.envs.openspiel.cases import AVAILABLE_CASES, load_game
from skyrl_gym.envs.openspiel.states import opening, serialize
from skyrl_gym.envs.openspiel.tasks import OpenSpielTasks, TaskConfig, task_of_row

TWO_CASES = {"cases": ["hex(board_size=5)", "leduc_poker"], "num_tasks_per_case": 3, "seed": 10}


def test_a_task_id_is_a_case_and_a_seed() -> None:
    tasks = OpenSpielTasks(TWO_CASES)
    assert tasks.total == len(tasks) == 6
    for task_id in range(6):
        task = tasks.generate(task_id)
        case = ["hex(board_size=5)", "leduc_poker"][task_id // 3]
        assert (task.task_id, task.case) == (task_id, case)
        assert task.state.history() == opening(load_game(case), 10 + task_id % 3, 4).history()


def test_task_ids_wrap_around() -> None:
    tasks = OpenSpielTasks(TWO_CASES)
    assert tasks.generate(-1).facts == tasks.generate(5).facts
    assert tasks.generate(7).facts == tasks.generate(1).facts


def test_the_recorded_positions_come_from_the_configuration() -> None:
    tasks = OpenSpielTasks({"cases": ["hex(board_size=5)"], "num_tasks_per_case": 43, "max_random_steps": 4})
    assert [tasks.generate(k).state.history() for k in (0, 1, 42)] == [[12, 14, 1, 9], [4, 19, 2, 10], [20, 3, 0, 10]]


def test_by_default_all_cases_have_a_hundred_tasks_which_differ() -> None:
    tasks = OpenSpielTasks()
    assert tasks.config.cases == AVAILABLE_CASES
    assert tasks.total == 3400
    hex_5 = AVAILABLE_CASES.index("hex(board_size=5)") * 100
    positions = {str(tasks.generate(hex_5 + k).state) for k in range(100)}
    assert len(positions) > 95  # a few are reached in two orders


def test_where_all_move_at_once_the_players_take_turns_unless_a_seat_is_set() -> None:
    options = {"cases": ["goofspiel(num_cards=8)"], "num_tasks_per_case": 4}
    assert [OpenSpielTasks(options).generate(k).player for k in range(4)] == [0, 1, 0, 1]
    assert [OpenSpielTasks(options | {"seat": 1}).generate(k).player for k in range(4)] == [1, 1, 1, 1]


def test_the_facts_bring_a_task_back() -> None:
    task = OpenSpielTasks({"cases": ["goofspiel(num_cards=8)"]}).generate(3)
    facts = json.loads(json.dumps(task.facts))
    assert facts["legal_actions"] == [[move.action, move.text] for move in task.legal.moves]
    assert (facts["task_id"], facts["current_player"], facts["num_players"]) == (3, 1, 2)
    assert facts["game_short_name"] == "goofspiel"
    again = task_of_row(facts, TaskConfig())
    assert (again.prompt, again.player, again.task_id) == (task.prompt, 1, 3)


def test_a_row_asks_the_tasks_question() -> None:
    tasks = OpenSpielTasks(TWO_CASES | {"reward_mode": "legal"})
    (row,) = tasks.rows([4])
    assert row["prompt"] == [{"role": "user", "content": tasks.generate(4).prompt}]
    assert (row["env_class"], row["data_source"]) == ("openspiel", "openspiel_leduc_poker")
    assert row["reward_spec"] == {"method": "legal", "ground_truth": ""}
    assert row["extra_info"]["env"] == "openspiel"
    assert row["extra_info"]["legal_actions"][0].keys() == {"id", "text"}


def test_a_game_row_only_introduces_the_game() -> None:
    (row,) = OpenSpielTasks(TWO_CASES).game_rows([0])
    assert row["env_class"] == "openspiel_game"
    (message,) = row["prompt"]
    assert message["content"].startswith("Game: hex(board_size=5)\n")
    assert "Legal actions" not in message["content"]


def test_rows_of_every_case_come_back_from_parquet(tmp_path: Path) -> None:
    tasks = OpenSpielTasks({"num_tasks_per_case": 1})
    rows = tasks.rows(range(tasks.total)) + tasks.game_rows(range(tasks.total))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    frame = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert frame == rows
    for row in frame[: tasks.total]:
        assert task_of_row(row["extra_info"], TaskConfig()).prompt == row["prompt"][0]["content"]


def test_a_row_with_only_a_task_id_is_made_from_the_configuration() -> None:
    config = TaskConfig.of(TWO_CASES)
    assert task_of_row({"task_id": 4}, config).facts == OpenSpielTasks(config).generate(4).facts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"serialized_game_and_state": None, "task_id": None}, "neither serialized_game_and_state nor task_id"),
        ({"serialized_game_and_state": "nonsense"}, "no state of OpenSpiel"),
        ({"task_id": "four"}, "task_id='four' must be a whole number"),
        ({"current_player": 1}, "current_player=1, but its state has player 0 to move"),
        ({"legal_actions": [[0, "a1"]]}, r"lists the legal actions \[0\], but its state has"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    facts = OpenSpielTasks(TWO_CASES).generate(0).facts | change
    with pytest.raises(ValueError, match=message):
        task_of_row({key: value for key, value in facts.items() if value is not None}, TaskConfig())


def test_a_finished_game_and_a_chance_event_are_no_task() -> None:
    game = load_game("leduc_poker")
    state = game.new_initial_state()
    with pytest.raises(ValueError, match="is no decision of a player"):
        task_of_row({"serialized_game_and_state": serialize(game, state)}, TaskConfig())
    for action in (0, 1, 2, 0):  # two cards, a raise, a fold
        state.apply_action(action)
    assert state.is_terminal()
    with pytest.raises(ValueError, match="is no decision of a player"):
        task_of_row({"serialized_game_and_state": serialize(game, state)}, TaskConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_mode": "win"}, "reward_mode='win' is unknown; use one of outcome, legal"),
        ({"n_playouts": 0}, "n_playouts=0 must be at least 1"),
        ({"max_random_steps": -1}, "max_random_steps=-1 must be at least 0"),
        ({"num_tasks_per_case": 1.5}, "num_tasks_per_case=1.5 must be a whole number"),
        ({"max_random_step": 3}, "did you mean 'max_random_steps'"),
        ({"cases": ["hex"], "seat": 2}, "seat=2, but the case 'hex' has 2 players"),
        ({"cases": ["2048(max_tile=0)"]}, "tells no outcomes apart"),
    ],
)
def test_a_configuration_that_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenSpielTasks(options)


def test_the_older_name_of_an_option_is_understood() -> None:
    assert TaskConfig.of({"num_tasks_per_game": 7}).num_tasks_per_case == 7


def test_game_types_come_from_the_environment_where_they_are_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_TYPES", "chess, checkers")
    assert TaskConfig.of({}).cases == ("chess", "checkers")
    assert TaskConfig.of({"game_types": ["othello"]}).cases == ("othello",)


def test_tasks_that_are_all_the_same_are_reported(caplog: pytest.LogCaptureFixture) -> None:
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
