from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.catch.catch_dataset import dataset_row
from examples.catch.env import CatchReward
from examples.catch.game import CatchState
from examples.catch.players import Player, catch_rate, expected_random_catch_rate, optimal_player, play, random_player


def row_of(ball_x: int, paddle_x: int, grid_w: int = 7, grid_h: int = 6, turns: int | None = None) -> dict[str, Any]:
    turns = grid_h - 1 if turns is None else turns
    start = CatchState(grid_w, grid_h, ball_x=ball_x, ball_y=0, paddle_x=paddle_x, turns_left=turns)
    return dataset_row(start, CatchReward(), "train", seed=0)


def scripted_player(actions: Iterable[str]) -> Player:
    """Return a player that plays `actions` in order."""
    replies = iter(actions)
    return lambda messages: next(replies)


ALL_STARTS = [row_of(ball_x, paddle_x) for ball_x, paddle_x in product(range(7), repeat=2)]


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    grid_w = draw(st.integers(1, 12))
    column = st.integers(0, grid_w - 1)
    return row_of(draw(column), draw(column), grid_w=grid_w, grid_h=draw(st.integers(2, 10)))


@given(rows())
def test_the_optimal_player_catches_every_ball_within_reach(row: dict[str, Any]) -> None:
    start = row["extra_info"]
    within_reach = abs(start["ball_x"] - start["paddle_x"]) <= start["max_turns"]
    missed_by = abs(start["ball_x"] - start["paddle_x"]) - start["max_turns"]
    expected = {"steps": start["grid_h"] - 1, "caught": int(within_reach)}
    assert play(row, optimal_player) == expected | ({} if within_reach else {"failure": f"missed by {missed_by}"})


def test_a_game_too_short_for_the_ball_is_never_caught() -> None:
    row = row_of(3, 3, turns=4)
    assert play(row, optimal_player) == {"steps": 4, "caught": 0, "failure": "out of turns"}
    assert expected_random_catch_rate([row]) == 0.0


@pytest.mark.parametrize(
    ("ball_x", "paddle_x", "grid_w", "grid_h"), [(0, 0, 3, 4), (2, 0, 3, 4), (1, 1, 2, 5), (4, 2, 7, 6)]
)
def test_the_exact_random_rate_is_the_mean_over_every_sequence_of_actions(
    ball_x: int, paddle_x: int, grid_w: int, grid_h: int
) -> None:
    row = row_of(ball_x, paddle_x, grid_w, grid_h)
    games = list(product("LRS", repeat=grid_h - 1))
    n_caught = sum(play(row, scripted_player(actions))["caught"] for actions in games)
    assert expected_random_catch_rate([row]) == pytest.approx(n_caught / len(games))


def test_a_sampled_random_rate_is_near_the_exact_one() -> None:
    sampled = catch_rate(ALL_STARTS * 40, random_player(seed=0))
    assert sampled == pytest.approx(expected_random_catch_rate(ALL_STARTS), abs=0.03)


def test_a_random_player_is_deterministic_for_a_seed() -> None:
    def replies(seed: int) -> list[str]:
        player = random_player(seed)
        return [player([]) for _ in range(50)]

    assert replies(1) == replies(1)
    assert replies(1) != replies(2)
    assert set(replies(1)) == {"L", "R", "S"}


def test_a_catch_rate_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row, got none"):
        catch_rate([], optimal_player)
