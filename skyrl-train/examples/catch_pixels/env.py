"""Catch whose board is drawn: the text has no positions."""

from typing import Any

from PIL import Image, ImageDraw

from examples.catch.env import CatchEnv
from examples.catch.game import CatchState
from skyrl_gym.envs.base_text_env import ConversationType, MessageType

RULES = (
    "You are playing Catch. The white ball falls one row per turn. Move the green paddle into its column. "
    "Answer with one letter: L (move left), R (move right) or S (stay)."
)
CELL = 8
"""Width and height of a cell in pixels: a patch of the model's image encoder."""
BACKGROUND, BALL, PADDLE = "black", "white", (80, 200, 120)


def draw(state: CatchState) -> Image.Image:
    """Return the board as an image of 7 x 6 cells, on a square canvas."""
    size = CELL * max(state.grid_w, state.grid_h)
    image = Image.new("RGB", (size, size), BACKGROUND)
    canvas = ImageDraw.Draw(image)
    x, y = CELL * state.ball_x, CELL * state.ball_y
    canvas.ellipse((x, y, x + CELL - 1, y + CELL - 1), fill=BALL)
    x, y = CELL * state.paddle_x, CELL * (state.grid_h - 1)
    canvas.rectangle((x, y + CELL // 2, x + CELL - 1, y + CELL - 1), fill=PADDLE)
    return image


class CatchPixelsEnv(CatchEnv):
    """A game of Catch whose states are images. `env_config.blank` hides them, to measure what the images are worth."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        super().__init__(env_config, extras)
        self._is_blank = bool(env_config.get("blank", False))

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the rules and the first board."""
        return [{"role": "system", "content": RULES}, self._state_message()], {}

    def _observations(self) -> ConversationType:
        return [] if self.state.is_over else [self._state_message()]

    def _state_message(self) -> MessageType:
        board = draw(self.state)
        if self._is_blank:
            board = Image.new("RGB", board.size, BACKGROUND)
        return {"role": "user", "content": [{"type": "image", "image": board}, {"type": "text", "text": "Action:"}]}
