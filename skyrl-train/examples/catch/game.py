"""The rules of Catch, without text and rewards.

A ball falls one row per turn. The paddle, on the bottom row, moves one column left or right, or stays. The ball is
caught if it reaches the bottom row in the paddle's column.
"""

from dataclasses import dataclass, replace
from typing import Final

MOVES: Final = {"L": -1, "R": 1, "S": 0}
"""Number of columns by which each action moves the paddle."""

DEFAULT_GRID_W: Final = 7
DEFAULT_GRID_H: Final = 6


@dataclass(frozen=True, slots=True)
class CatchState:
    """A state of the game, e.g. ``CatchState(grid_w=7, grid_h=6, ball_x=5, ball_y=0, paddle_x=2, turns_left=5)``.

    Columns are counted from 0 at the left, rows from 0 at the top. Raises ValueError for a position outside the grid.
    """

    grid_w: int
    grid_h: int
    ball_x: int
    ball_y: int
    paddle_x: int
    turns_left: int

    def __post_init__(self) -> None:
        if self.grid_w < 1 or self.grid_h < 2:
            raise ValueError(
                f"grid_w={self.grid_w}, grid_h={self.grid_h}: a ball needs at least 1 column and 2 rows to fall"
            )
        for name, size_name in (("ball_x", "grid_w"), ("paddle_x", "grid_w"), ("ball_y", "grid_h")):
            value, size = getattr(self, name), getattr(self, size_name)
            if not 0 <= value < size:
                raise ValueError(f"{name}={value} must lie in 0..{size - 1} ({size_name}={size})")
        if self.turns_left < 0:
            raise ValueError(f"turns_left={self.turns_left} must not be negative")

    @property
    def distance(self) -> int:
        """Number of columns between ball and paddle."""
        return abs(self.ball_x - self.paddle_x)

    @property
    def has_landed(self) -> bool:
        return self.ball_y >= self.grid_h - 1

    @property
    def is_over(self) -> bool:
        return self.has_landed or self.turns_left == 0

    @property
    def is_caught(self) -> bool:
        return self.has_landed and self.ball_x == self.paddle_x


def move_paddle(paddle_x: int, action: str, grid_w: int) -> int:
    """Return the paddle's column after `action`. Walls stop it."""
    return min(max(paddle_x + MOVES[action], 0), grid_w - 1)


def advance(state: CatchState, action: str) -> CatchState:
    """Play a turn: the paddle moves, then the ball falls one row."""
    return replace(
        state,
        ball_y=state.ball_y + 1,
        paddle_x=move_paddle(state.paddle_x, action, state.grid_w),
        turns_left=state.turns_left - 1,
    )
