import re
from typing import Any

import pytest

import skyrl_gym
from examples.openspiel.openspiel_dataset import main

SMALL = ("--cases", "tic_tac_toe,hex(board_size=5),leduc_poker", "--num_tasks_per_case", "20")


@pytest.fixture(autouse=True)
def _no_game_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAME_TYPES", raising=False)


def test_every_row_can_be_played(prepare: Any, play: Any) -> None:
    """In the mode `legal` any legal move is correct."""
    splits = prepare(main, *SMALL, "--reward_mode", "legal")
    rows = splits["train"] + splits["validation"]
    assert len(rows) == 60
    for row in rows:
        for move in row.env_extras["extra_info"]["legal_actions"]:
            assert play(row, f"I play \\boxed{{{move['text']}}}") == 1.0
        assert play(row, "I play \\boxed{no such move}") == 0.0


def test_moves_are_scored_by_their_outcome_by_default(prepare: Any, play: Any) -> None:
    rows = prepare(main, *SMALL)["train"]
    rewards = set()
    for row in rows:
        assert row.env_extras["reward_spec"]["method"] == "outcome"
        rewards |= {play(row, f"\\boxed{{{m['text']}}}") for m in row.env_extras["extra_info"]["legal_actions"]}
        assert play(row, "I resign.") == 0.0
    assert 0.0 <= min(rewards) < max(rewards) <= 1.0


def test_whole_games_can_be_played_to_the_end(prepare: Any) -> None:
    splits = prepare(main, *SMALL, "--whole_games")
    for row in splits["train"] + splits["validation"]:
        assert row.env_class == "openspiel_game"
        with skyrl_gym.make("openspiel_game", env_config={}, extras=row.env_extras | {"max_turns": 60}) as env:
            prompt, _ = env.init(row.prompt)
            output: Any = {"done": False, "observations": prompt}
            while not output["done"]:
                text = output["observations"][-1]["content"]
                moves = re.findall(r"^\d+: (.*)$", text[text.rindex("Legal actions:") :], re.MULTILINE)
                output = env.step(f"\\boxed{{{moves[0]}}}")
        assert 0.0 <= output["reward"] <= 1.0


def test_no_position_is_in_both_files(prepare: Any) -> None:
    """With few positions, many tasks are equal."""
    flags = ("--cases", "tic_tac_toe", "--num_tasks_per_case", "100", "--max_random_steps", "2")
    for kind in ([], ["--whole_games"]):
        splits = prepare(main, *flags, *kind)
        train, validation = (
            {row.env_extras["extra_info"]["serialized_game_and_state"] for row in splits[split]}
            for split in ("train", "validation")
        )
        for split, rows in splits.items():
            assert {row.env_extras["extra_info"]["split"] for row in rows} == {split}
        assert train.isdisjoint(validation)
        assert min(len(train), len(validation)) > 0
        assert len(splits["train"]) + len(splits["validation"]) == 100 > len(train) + len(validation)


def test_positions_depend_on_the_seed(prepare: Any) -> None:
    def prompts(seed: str) -> list[str]:
        return [row.prompt[0]["content"] for row in prepare(main, *SMALL, "--seed", seed)["train"]]

    assert prompts("1") == prompts("1")
    assert prompts("1") != prompts("2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cases", "tic_tac_tow"], "tic_tac_tow"),
        (["--num_tasks_per_case", "0"], "num_tasks_per_case=0 must be at least 1"),
        (["--source", "hub"], "this dataset is not on the Hub"),
        (["--reward_mode", "glory"], "invalid choice: 'glory'"),
    ],
)
def test_invalid_flags_are_refused(flags: list[str], message: str, refuse: Any) -> None:
    assert message in refuse(main, *flags)


def test_rows_without_a_position_are_refused(source: Any, refuse: Any) -> None:
    row = {"prompt": [], "extra_info": {"case": "chess"}}
    message = refuse(main, "--source", source([row], [row]))
    assert "it has no 'serialized_game_and_state'; its columns are case" in message
