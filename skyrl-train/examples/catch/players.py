"""Players to compare a model with: an optimal one and a random one."""

import random
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

from examples.catch.env import CatchEnv
from examples.catch.game import MOVES, move_paddle
from examples.catch.prompt import parse_state
from skyrl_gym.envs.base_text_env import ConversationType

Player = Callable[[ConversationType], str]
"""A function from the latest messages (the prompt, then each observation) to a reply."""


def optimal_player(messages: ConversationType) -> str:
    """Move towards the ball's column. This catches every ball that can be caught."""
    state = parse_state(messages[-1]["content"])
    if state.ball_x == state.paddle_x:
        return "S"
    return "L" if state.ball_x < state.paddle_x else "R"


def random_player(seed: int) -> Player:
    """Return a player that replies L, R or S with equal probability. Deterministic for a seed."""
    rng = random.Random(seed)
    return lambda messages: rng.choice(list(MOVES))


def play(row: Mapping[str, Any], player: Player) -> dict[str, Any]:
    """Play a dataset row's game. Return the environment's metrics, e.g. ``{"steps": 5, "caught": 1}``."""
    with _make_env(row) as env:
        _play_game(env, row, player)
        return env.get_metrics()


def conversation(row: Mapping[str, Any], player: Player) -> ConversationType:
    """Play a dataset row's game. Return all messages, including the player's replies."""
    with _make_env(row) as env:
        return _play_game(env, row, player)


def _play_game(env: CatchEnv, row: Mapping[str, Any], player: Player) -> ConversationType:
    messages, _ = env.init(row["prompt"])
    history, done = list(messages), False
    while not done:
        reply = player(messages)
        step = env.step(reply)
        messages, done = step["observations"], step["done"]
        history += [{"role": "assistant", "content": reply}, *messages]
    return history


def catch_rate(rows: Iterable[Mapping[str, Any]], player: Player) -> float:
    """Return the fraction of `rows` whose ball `player` catches. Each row is played once."""
    return _mean(play(row, player)["caught"] for row in rows)


def expected_random_catch_rate(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the exact expected `catch_rate` of the random player, as a baseline for an untrained policy."""
    return _mean(map(_random_catch_probability, rows))


def _random_catch_probability(row: Mapping[str, Any]) -> float:
    """Return the exact probability that the random player catches a row's ball.

    It follows from the distribution of the paddle's column, one turn after another.
    """
    start = _make_env(row).state
    n_rows_to_fall = start.grid_h - 1 - start.ball_y
    if n_rows_to_fall > start.turns_left:
        return 0.0
    probabilities = [float(column == start.paddle_x) for column in range(start.grid_w)]
    for _ in range(n_rows_to_fall):
        after_move = [0.0] * start.grid_w
        for column, probability in enumerate(probabilities):
            for action in MOVES:
                after_move[move_paddle(column, action, start.grid_w)] += probability / len(MOVES)
        probabilities = after_move
    return probabilities[start.ball_x]


def _make_env(row: Mapping[str, Any]) -> CatchEnv:
    return CatchEnv(env_config={}, extras={key: row[key] for key in row if key not in ("prompt", "env_class")})


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    if not numbers:
        raise ValueError("a catch rate needs at least one row, got none")
    return fmean(numbers)
