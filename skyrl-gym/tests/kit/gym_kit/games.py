"""Positions of OpenSpiel games, and models that play them."""

from __future__ import annotations

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.openspiel.cases import State, load_game


def position(case: str, *actions: int) -> State:
    """Return the state of a game after these actions."""
    state = load_game(case).new_initial_state()
    for action in actions:
        state.apply_action(action)
    return state


class ScriptedModel:
    """A model that gives these replies, repeats the last one forever, and records its conversations in `asked`."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.asked: list[ConversationType] = []

    def __call__(self, messages: ConversationType) -> str:
        self.asked.append(messages)
        return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
