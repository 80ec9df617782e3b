"""Rewards from 0 (worst) to 1: for single moves, by their outcome in random games, and for finished games."""

import random
from collections.abc import Sequence

from skyrl_gym.envs.openspiel.cases import Game, State
from skyrl_gym.envs.openspiel.states import apply_move, random_step

REWARD_MODES = ("outcome", "legal")

PRACTICAL_UTILITIES = {"gin_rummy": (-50.0, 50.0), "hearts": (0.0, 26.0)}
"""Realistic utility bounds by game, where OpenSpiel's bounds are far from usual results.

gin_rummy: the bounds, ±123, need a hand of court cards against a gin. A gin against an average hand gives about 50.
hearts: the bound 36 includes the jack of diamonds, but it only counts with the parameter `jd_bonus`.
"""


def utility_range(game: Game) -> tuple[float, float]:
    """Return the bounds that returns are clipped to. Raises `ValueError` if they are equal."""
    low, high = PRACTICAL_UTILITIES.get(str(game).removesuffix("()"), (game.min_utility(), game.max_utility()))
    if not low < high:
        raise ValueError(
            f"the utilities of the game {game} range from {low} to {high}, so returns cannot be scaled; choose another "
            "case, or reward_mode=legal"
        )
    return low, high


def scaled_return(game: Game, returns: Sequence[float], player: int) -> float:
    """Scale the return of `player` from `utility_range` to the range from 0 to 1, and clip it."""
    low, high = utility_range(game)
    return min(1.0, max(0.0, (returns[player] - low) / (high - low)))


def playout_value(state: State, player: int, n_playouts: int, rng: random.Random) -> float:
    """Return the mean scaled return of `player` if everyone plays at random from `state` on."""
    game = state.get_game()
    return sum(scaled_return(game, _playout(state, rng), player) for _ in range(n_playouts)) / n_playouts


def move_value(state: State, player: int, action: int, n_playouts: int, seed: str) -> float:
    """Return the mean scaled return of `player` after a legal `action`, from 0 to 1.

    Playouts are seeded with `seed` and the action, so a move's value is deterministic. In a simultaneous game, each
    playout draws the opponents' moves.
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
