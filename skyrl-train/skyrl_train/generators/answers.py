"""The rewards in what environments answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.errors import EnvError


class UnknownReward(EnvError):
    """An environment could not grade what it saw."""


def turn_reward(output: BaseTextEnvStepOutput, n_tokens: int) -> float | list[float]:
    """The reward of a turn of `n_tokens`, or one for each of them.

    Raises:
        UnknownReward: it is None.
        EnvError: there is not one for each.
    """
    reward: Any = output["reward"]
    if reward is None:
        raise UnknownReward("step() returned reward=None: the reward is unknown")
    if not isinstance(reward, list):
        return float(reward)
    if len(reward) != n_tokens:
        raise EnvError(f"step() returned {len(reward)} rewards for a turn of {n_tokens} tokens; return one for each")
    return [float(value) for value in reward]


def weighted_reward(
    reward: float | list[float], components: Mapping[str, float], weights: Mapping[str, float]
) -> float | list[float]:
    """The reward, or where one of its components has a weight, their sum: 1 is the weight of those that have none."""
    if not weights.keys() & components.keys():
        return reward
    return sum(weights.get(name, 1.0) * value for name, value in components.items())
