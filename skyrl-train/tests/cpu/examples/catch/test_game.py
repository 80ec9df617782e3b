from dataclasses import replace

import pytest

from examples.catch.game import CatchState

START = CatchState(grid_w=7, grid_h=6, ball_x=5, ball_y=0, paddle_x=2, turns_left=5)


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
