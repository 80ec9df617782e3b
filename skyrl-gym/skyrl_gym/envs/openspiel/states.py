"""Game states and their transitions, with all randomness from a seeded generator.

A model only sees states in which it decides, as the player to move or, in simultaneous games, as one of the players.
"""

import random
from collections.abc import Mapping

from skyrl_gym.envs.openspiel.cases import Game, State, open_spiel


def draw_position(game: Game, seed: int, n_random_steps: int) -> State:
    """Return the first decision after `n_random_steps` steps from the root: random moves, dealt cards and dice.

    If these steps end the game, return the game's first decision.

    Raises:
        ValueError: there is no decision, because no player can move.
    """
    rng = random.Random(seed)
    state = game.new_initial_state()
    for _ in range(n_random_steps):
        if state.is_terminal():
            break
        random_step(state, rng)
    advance_chance(state, rng)
    if state.is_terminal():
        state = game.new_initial_state()
        advance_chance(state, random.Random(seed))
    if state.is_terminal() or not any(legal_actions(state, player) for player in range(game.num_players())):
        raise ValueError(f"no player of the game {game} can move (seed {seed}); choose another case")
    return state


def advance_chance(state: State, rng: random.Random) -> None:
    """Draw every chance event up to the next decision or the end."""
    while state.is_chance_node():
        state.apply_action(_chance_event(state, rng))


def random_step(state: State, rng: random.Random) -> None:
    """Apply one random chance event, or one random move of each player to move."""
    if state.is_chance_node():
        state.apply_action(_chance_event(state, rng))
    elif is_simultaneous(state):
        apply_jointly(state, {}, rng)
    else:
        state.apply_action(rng.choice(state.legal_actions()))


def apply_move(state: State, player: int, action: int, rng: random.Random) -> None:
    """Play a legal `action` of `player`. In a simultaneous game, all other players move at random."""
    if is_simultaneous(state):
        apply_jointly(state, {player: action}, rng)
    else:
        state.apply_action(action)


def apply_jointly(state: State, actions: Mapping[int, int], rng: random.Random) -> None:
    """Play one action of every player at once. Players missing in `actions` move at random."""
    joint = [
        actions[player] if player in actions else _random_action(state, player, rng)
        for player in range(state.num_players())
    ]
    state.apply_actions(joint)


def is_simultaneous(state: State) -> bool:
    """Return True if all players move at once."""
    return bool(state.is_simultaneous_node())


def player_to_move(state: State, seat: int) -> int:
    """Return the player to move, or `seat` if all players move at once."""
    return seat if is_simultaneous(state) else int(state.current_player())


def legal_actions(state: State, player: int) -> list[int]:
    """Return the ids of `player`'s legal actions. Empty if it is not their turn."""
    return list(state.legal_actions(player))


def serialize(game: Game, state: State) -> str:
    """Return a string from which `deserialize` restores the game and the state."""
    return str(open_spiel().serialize_game_and_state(game, state))


def deserialize(text: str) -> tuple[Game, State]:
    """Return the game and state that `serialize` wrote. Raises `ValueError` for anything else."""
    spiel = open_spiel()
    try:
        game, state = spiel.deserialize_game_and_state(text)
    except (spiel.SpielError, ValueError, IndexError, TypeError) as problem:
        raise ValueError(
            f"serialized_game_and_state is not a state of OpenSpiel {spiel.__version__}: {problem}; got {text!r}"
        ) from problem
    return game, state


def _chance_event(state: State, rng: random.Random) -> int:
    outcomes, probabilities = zip(*state.chance_outcomes(), strict=True)
    return int(rng.choices(outcomes, weights=probabilities, k=1)[0])


def _random_action(state: State, player: int, rng: random.Random) -> int:
    """Return a random action. A player without a choice at this node passes with action 0, as OpenSpiel requires."""
    return rng.choice(legal_actions(state, player) or [0])
