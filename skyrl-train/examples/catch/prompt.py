"""Text for the model: the rules once, then the game's state every turn."""

import re

from examples.catch.game import CatchState
from skyrl_gym.envs.base_text_env import ConversationType, MessageType

SYSTEM_PROMPT = (
    "You are playing Catch. A ball falls straight down, one row per turn. You move a paddle on the bottom row. "
    "Catch the ball: be in its column when it reaches the bottom row. "
    "Each turn, answer with exactly one letter: L (move left), R (move right) or S (stay)."
)

STATE_LINE = re.compile(
    r"State: grid_w=(?P<grid_w>\d+), grid_h=(?P<grid_h>\d+), ball=\((?P<ball_x>\d+),(?P<ball_y>\d+)\), "
    r"paddle_x=(?P<paddle_x>\d+), turns_left=(?P<turns_left>\d+)\."
)


def format_state(state: CatchState) -> str:
    """Return two lines that show `state` and ask for an action."""
    return (
        f"State: grid_w={state.grid_w}, grid_h={state.grid_h}, ball=({state.ball_x},{state.ball_y}), "
        f"paddle_x={state.paddle_x}, turns_left={state.turns_left}.\n"
        "Action (L/R/S):"
    )


def parse_state(text: str) -> CatchState:
    """Parse a state written by `format_state`. Raise ValueError if `text` contains none."""
    line = STATE_LINE.search(text)
    if line is None:
        raise ValueError(f"no state line in {text!r}; expected one such as 'State: grid_w=7, grid_h=6, ball=(5,0), …'")
    return CatchState(**{name: int(value) for name, value in line.groupdict().items()})


def state_message(state: CatchState) -> MessageType:
    """Return the user message that shows `state`."""
    return {"role": "user", "content": format_state(state)}


def opening(state: CatchState) -> ConversationType:
    """Return the prompt of a game that starts at `state`: the rules, then the state."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, state_message(state)]
