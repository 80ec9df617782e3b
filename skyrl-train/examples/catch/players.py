"""Players that frame what training can reach: one that plays perfectly, one that plays at random.

A player sees exactly what the model sees, the messages, and answers with text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

from examples.catch.env import CatchEnv
from examples.catch.game import MOVES, move_paddle
from examples.catch.prompt import parse_state
from skyrl_gym.envs.base_text_env import ConversationType

Player = Callable[[ConversationType], str]
"""From the latest messages to a reply."""


def optimal_player(messages: ConversationType) -> str:
    """Move towards the ball's column; catches every ball that can be caught."""
    state = parse_state(messages[-1]["content"])
    if state.ball_x == state.paddle_x:
        return "S"
    return "L" if state.ball_x < state.paddle_x else "R"


def random_player(seed: int) -> Player:
    """A player that answers L, R or S with equal probability, in the same order for the same seed."""
    rng = random.Random(seed)
    return lambda messages: rng.choice(list(MOVES))


def play(row: Mapping[str, Any], player: Player) -> dict[str, Any]:
    """Play the game of one dataset row; the environment's metrics: ``{"steps": 5, "caught": 1}``."""
    with _env_of(row) as env:
        _played(env, row, player)
        return env.get_metrics()


def conversation(row: Mapping[str, Any], player: Player) -> ConversationType:
    """Every message of the game of one dataset row, the player's replies included."""
    with _env_of(row) as env:
        return _played(env, row, player)


def _played(env: CatchEnv, row: Mapping[str, Any], player: Player) -> ConversationType:
    messages, _ = env.init(row["prompt"])
    history, done = list(messages), False
    while not done:
        reply = player(messages)
        step = env.step(reply)
        messages, done = step["observations"], step["done"]
        history += [{"role": "assistant", "content": reply}, *messages]
    return history


def catch_rate(rows: Iterable[Mapping[str, Any]], player: Player) -> float:
    """The fraction of `rows` that `player` catches, each played once."""
    return _mean(play(row, player)["caught"] for row in rows)


def expected_random_catch_rate(rows: Iterable[Mapping[str, Any]]) -> float:
    """The exact mean of `catch_rate` over random players: where a policy that has learned nothing stands."""
    return _mean(map(_random_catch_probability, rows))


def _random_catch_probability(row: Mapping[str, Any]) -> float:
    """Follow the distribution of the paddle's column [grid_w] instead of single games."""
    start = _env_of(row).state
    n_rows_to_fall = start.grid_h - 1 - start.ball_y
    if n_rows_to_fall > start.turns_left:
        return 0.0
    columns = [float(column == start.paddle_x) for column in range(start.grid_w)]
    for _ in range(n_rows_to_fall):
        reached = [0.0] * start.grid_w
        for column, probability in enumerate(columns):
            for action in MOVES:
                reached[move_paddle(column, action, start.grid_w)] += probability / len(MOVES)
        columns = reached
    return columns[start.ball_x]


def _env_of(row: Mapping[str, Any]) -> CatchEnv:
    return CatchEnv(env_config={}, extras={key: row[key] for key in row if key not in ("prompt", "env_class")})


def _mean(values: Iterable[float]) -> float:
    of_each = list(values)
    if not of_each:
        raise ValueError("a catch rate needs at least one row, got none")
    return fmean(of_each)
