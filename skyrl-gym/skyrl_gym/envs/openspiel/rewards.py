"""Rewards: a move by what it leads to, a game by how it ended; both from 0, the worst, to 1."""

from __future__ import annotations

import random
from collections.abc import Sequence

from skyrl_gym.envs.openspiel.cases import Game, State
from skyrl_gym.envs.openspiel.states import apply_move, random_step

REWARD_MODES = ("outcome", "legal")

PRACTICAL_UTILITIES = {"gin_rummy": (-50.0, 50.0), "hearts": (0.0, 26.0)}
"""Where the utilities that a game can have say little about those that it does have, by its name without parameters.

gin_rummy: the bounds, ±123, need a hand of court cards against a gin; a gin against an average hand is worth about 50.
hearts: 36 is for the jack of diamonds, which counts only with the parameter `jd_bonus`.
"""


def utility_range(game: Game) -> tuple[float, float]:
    """The lowest and the highest return that is told apart. Raises `ValueError` where the game has no such range."""
    low, high = PRACTICAL_UTILITIES.get(str(game).removesuffix("()"), (game.min_utility(), game.max_utility()))
    if not low < high:
        raise ValueError(
            f"the utilities of the game {game} go from {low} to {high}, which tells no outcomes apart; choose another "
            "case, or reward_mode=legal"
        )
    return low, high


def scaled_return(game: Game, returns: Sequence[float], player: int) -> float:
    """The return of `player` as a number from 0 to 1, what lies outside `utility_range` cut off."""
    low, high = utility_range(game)
    return min(1.0, max(0.0, (returns[player] - low) / (high - low)))


def playout_value(state: State, player: int, n_playouts: int, rng: random.Random) -> float:
    """The mean scaled return of `player` when everyone plays at random from `state` on."""
    game = state.get_game()
    return sum(scaled_return(game, _playout(state, rng), player) for _ in range(n_playouts)) / n_playouts


def move_value(state: State, player: int, action: int, n_playouts: int, seed: str) -> float:
    """What a legal `action` of `player` leads to in the mean, from 0 to 1.

    The playouts are drawn from `seed` and the action, so that a move is always worth the same. Where all players move
    at once, each playout draws the others' moves.
    """
    rng = random.Random(f"{seed}/{action}")
    total = 0.0
    for _ in range(n_playouts):
        after = state.clone()
        apply_move(after, player, action, rng)
        total += playout_value(after, player, 1, rng)
    return total / n_playouts


def _playout(state: State, rng: random.Random) -> list[float]:
    state = state.clone()
    while not state.is_terminal():
        random_step(state, rng)
    return list(state.returns())
