"""What environments answer, checked: an `EnvError` names what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.dataset.prompts import is_conversation
from skyrl_train.errors import EnvError


class UnknownReward(EnvError):
    """An environment could not grade what it saw."""


def checked_prompt(answer: Any) -> list[dict[str, Any]]:
    """The messages that `init` returned."""
    prompt, _ = answer
    if not prompt or not is_conversation(prompt):
        raise EnvError(f"init() returned prompt={prompt!r}; it must be a list of messages")
    return list(prompt)


def checked_output(output: Any) -> BaseTextEnvStepOutput:
    """What `step` returned.

    Raises:
        UnknownReward: its reward is None.
    """
    if not isinstance(output, dict):
        raise EnvError(f"step() returned {output!r}; return BaseTextEnvStepOutput(observations, reward, done)")
    for name in ("observations", "reward", "done"):
        if name not in output:
            raise EnvError(f"step() returned no {name!r}; return BaseTextEnvStepOutput(observations, reward, done)")
    if output["reward"] is None:
        raise UnknownReward("step() returned reward=None: the reward is unknown")
    if not is_reward(output["reward"]):
        raise EnvError(
            f"step() returned reward={output['reward']!r}; it must be a finite number, or one for each sampled token"
        )
    if not output["done"] and not is_conversation(output["observations"]):
        raise EnvError(f"step() returned observations={output['observations']!r}; they must be a list of messages")
    action = output.get("postprocessed_action")
    if action is not None and not isinstance(action, str):
        raise EnvError(f"step() returned postprocessed_action={action!r}; it must be a string, or left out")
    history = (output.get("metadata") or {}).get("modified_chat_history")
    if history is not None and (not history or not is_conversation(history)):
        raise EnvError(f"step() returned modified_chat_history={history!r}; it must be a list of messages")
    return output  # type: ignore[return-value]


def reward_components(output: BaseTextEnvStepOutput) -> dict[str, float]:
    """The named parts of a turn's reward, which an environment may report as `metadata["reward_components"]`."""
    components = (output.get("metadata") or {}).get("reward_components") or {}
    if not isinstance(components, Mapping) or not all(_is_number(reward) for reward in components.values()):
        raise EnvError(f"step() returned reward_components={components!r}; they must be finite numbers by name")
    return {name: float(reward) for name, reward in components.items()}


def weighted_reward(
    reward: float | list[float], components: Mapping[str, float], weights: Mapping[str, float]
) -> float | list[float]:
    """The reward, or where one of its components has a weight, their sum: 1 is the weight of those that have none."""
    if not weights.keys() & components.keys():
        return reward
    return sum(weights.get(name, 1.0) * value for name, value in components.items())


def turn_reward(output: BaseTextEnvStepOutput, n_tokens: int) -> float | list[float]:
    """The reward of a turn of `n_tokens`, or one for each of them."""
    reward: Any = output["reward"]
    if not isinstance(reward, list):
        return float(reward)
    if len(reward) != n_tokens:
        raise EnvError(f"step() returned {len(reward)} rewards for a turn of {n_tokens} tokens; return one for each")
    return [float(value) for value in reward]


def checked_metrics(metrics: Any) -> dict[str, Any]:
    """What `get_metrics` returned."""
    if not isinstance(metrics, dict):
        raise EnvError(f"get_metrics() returned {metrics!r}; it must be a dict")
    return metrics


def is_reward(value: Any) -> bool:
    """A finite number, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(_is_number(item) for item in value)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
