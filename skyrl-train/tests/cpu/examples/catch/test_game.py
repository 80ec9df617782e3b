from dataclasses import replace

import pytest

from examples.catch.game import CatchState, advance, move_paddle

START = CatchState(grid_w=7, grid_h=6, ball_x=5, ball_y=0, paddle_x=2, turns_left=5)


def test_a_turn_moves_the_paddle_and_drops_the_ball() -> None:
    assert advance(START, "R") == replace(START, ball_y=1, paddle_x=3, turns_left=4)
    assert advance(START, "L") == replace(START, ball_y=1, paddle_x=1, turns_left=4)
    assert advance(START, "S") == replace(START, ball_y=1, paddle_x=2, turns_left=4)


@pytest.mark.parametrize(("column", "action", "reached"), [(0, "L", 0), (6, "R", 6), (0, "R", 1), (6, "L", 5)])
def test_the_walls_stop_the_paddle(column: int, action: str, reached: int) -> None:
    assert move_paddle(column, action, grid_w=7) == reached


def test_the_game_is_over_when_the_ball_lands_or_no_turns_are_left() -> None:
    assert not START.is_over
    assert replace(START, ball_y=5).is_over
    assert replace(START, turns_left=0).is_over


def test_the_ball_is_caught_on_the_bottom_row_in_the_column_of_the_paddle() -> None:
    assert replace(START, ball_y=5, paddle_x=5).is_caught
    assert not replace(START, ball_y=5, paddle_x=4).is_caught
    assert not replace(START, ball_y=4, paddle_x=5, turns_left=0).is_caught


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ball_x": 7}, r"ball_x=7 must lie in 0\.\.6 \(grid_w=7\)"),
        ({"ball_y": 6}, r"ball_y=6 must lie in 0\.\.5 \(grid_h=6\)"),
        ({"paddle_x": -1}, r"paddle_x=-1 must lie in 0\.\.6"),
        ({"turns_left": -1}, "turns_left=-1 must not be negative"),
        ({"grid_h": 1}, "grid_w=7, grid_h=1: a ball needs"),
        ({"grid_w": 0}, "grid_w=0, grid_h=6: a ball needs"),
    ],
)
def test_a_state_outside_the_grid_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(START, **change)
