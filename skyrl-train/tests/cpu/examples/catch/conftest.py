from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from examples.catch.env import CatchEnv


@pytest.fixture
def new_game() -> Callable[..., CatchEnv]:
    """Create a game with ball 5 and paddle 2 on the default grid; keyword arguments change the row."""

    def make_game(reward: dict[str, Any] | None = None, **start: Any) -> CatchEnv:
        extras = {"reward_spec": reward or {}, "extra_info": {"ball_x": 5, "paddle_x": 2} | start}
        return CatchEnv(env_config={}, extras=extras)

    return make_game
