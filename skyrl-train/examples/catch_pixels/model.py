"""A tiny vision-language model that sees the board and knows the letters of Catch, but not how to play.

A short training teaches it to describe a board ("ball 3,0 paddle 5"), and to answer L, R or S at random when it is
asked to play. It sees no rewards and no good play.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.catch.game import MOVES, CatchState
from examples.catch_pixels.env import CELL, RULES, CatchPixelsEnv, draw
from examples.tiny_vision_model import Example, make_tiny_vision_model

N_CELLS = 7
DESCRIBED = 0.8
"""Share of examples that describe a board."""


def make_model(rows: Sequence[dict[str, Any]], folder: Path, seed: int) -> float:
    """Write the model with its tokenizer and processor. Return the last loss in nats per token."""
    turn = [{"role": "system", "content": RULES}, {"role": "user", "content": "Action:"}]
    replies = [*MOVES, "Describe:", "ball ", " paddle ", ",", *"0123456789"]
    texts = [[*turn, {"role": "assistant", "content": reply}] for reply in replies] * 2
    rows = list(rows)

    def draw_example(rng: random.Random) -> Example:
        return _example(rng.choice(rows), rng)

    return make_tiny_vision_model(texts, draw_example, folder, seed, image_size=N_CELLS * CELL, n_patches=N_CELLS)


def _example(row: dict[str, Any], rng: random.Random) -> Example:
    """Return a board with its description or a random move."""
    env = CatchPixelsEnv({}, row)
    for _ in range(rng.randrange(env.max_turns)):
        env.step(rng.choice(list(MOVES)))
    if rng.random() < DESCRIBED:
        content = [{"type": "image", "image": draw(env.state)}, {"type": "text", "text": "Describe:"}]
        return [{"role": "user", "content": content}], describe(env.state)
    return env.init([])[0], rng.choice(list(MOVES))


def describe(state: CatchState) -> str:
    """Return the positions on a board, e.g. "ball 3,0 paddle 5"."""
    return f"ball {state.ball_x},{state.ball_y} paddle {state.paddle_x}"
