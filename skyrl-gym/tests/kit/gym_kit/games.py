"""Positions of OpenSpiel games, and models that play them."""

import random

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.openspiel.cases import State, load_game
from skyrl_gym.envs.openspiel.moves import LegalMoves, legal_moves
from skyrl_gym.envs.openspiel.states import draw_position, random_step


def position(case: str, *actions: int) -> State:
    """Return the state of a game after these actions."""
    state = load_game(case).new_initial_state()
    for action in actions:
        state.apply_action(action)
    return state


def walk(case: str, seed: int) -> list[LegalMoves]:
    """Return the legal moves of every decision of a random game."""
    state, rng, decisions = draw_position(load_game(case), seed, 0), random.Random(seed), []
    while not state.is_terminal():
        if not state.is_chance_node():
            decisions.append(legal_moves(state, state.current_player()))
        random_step(state, rng)
    return decisions


HEX = legal_moves(position("hex(board_size=11)"), 0)
TAKEN_HEX = legal_moves(position("hex(board_size=5)", 0, 6), 0)
"""A board on which a1 and b2 are taken."""
POKER = walk("leduc_poker", 1)[0]
BACKGAMMON = next(legal for legal in walk("backgammon", 0) if any("(" in move.text for move in legal.moves))
"""A decision in which two actions have the same text."""


class ScriptedModel:
    """A model that gives these replies, repeats the last one forever, and records its conversations in `asked`."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.asked: list[ConversationType] = []

    def __call__(self, messages: ConversationType) -> str:
        self.asked.append(messages)
        return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
