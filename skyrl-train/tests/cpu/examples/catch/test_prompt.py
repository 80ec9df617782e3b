import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.catch.game import CatchState
from examples.catch.prompt import format_state, parse_state

START = CatchState(grid_w=7, grid_h=6, ball_x=5, ball_y=0, paddle_x=2, turns_left=5)


@st.composite
def states(draw: st.DrawFn) -> CatchState:
    grid_w, grid_h = draw(st.integers(1, 30)), draw(st.integers(2, 30))
    return CatchState(
        grid_w=grid_w,
        grid_h=grid_h,
        ball_x=draw(st.integers(0, grid_w - 1)),
        ball_y=draw(st.integers(0, grid_h - 1)),
        paddle_x=draw(st.integers(0, grid_w - 1)),
        turns_left=draw(st.integers(0, 40)),
    )


def test_the_state_is_two_lines_and_a_text_without_them_is_refused() -> None:
    with pytest.raises(ValueError, match="no state line in 'Action"):
        parse_state("Action (L/R/S):")
    assert format_state(START) == ("State: grid_w=7, grid_h=6, ball=(5,0), paddle_x=2, turns_left=5.\nAction (L/R/S):")


@given(states())
def test_the_state_can_be_parsed_from_the_text(state: CatchState) -> None:
    assert parse_state(format_state(state)) == state
