"""What environments answer, checked: an `InvalidAnswer` names what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.error import InvalidAnswer


def is_conversation(value: Any) -> bool:
    """Whether `value` is a list of chat messages, possibly an empty one."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )


def checked_prompt(answer: Any) -> ConversationType:
    """The messages that `init` returned."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise InvalidAnswer(f"init() returned {answer!r}; return the prompt and a dict")
    prompt, _ = answer
    if not prompt or not is_conversation(prompt):
        raise InvalidAnswer(f"init() returned prompt={prompt!r}; it must be a list of messages")
    return list(prompt)


def checked_output(output: Any) -> BaseTextEnvStepOutput:
    """What `step` returned; its reward may be None."""
    if not isinstance(output, dict):
        raise InvalidAnswer(f"step() returned {output!r}; return BaseTextEnvStepOutput(observations, reward, done)")
    for name in ("observations", "reward", "done"):
        if name not in output:
            raise InvalidAnswer(
                f"step() returned no {name!r}; return BaseTextEnvStepOutput(observations, reward, done)"
            )
    if output["reward"] is not None and not is_reward(output["reward"]):
        raise InvalidAnswer(
            f"step() returned reward={output['reward']!r}; it must be a finite number, or one for each sampled token"
        )
    if not output["done"] and not is_conversation(output["observations"]):
        raise InvalidAnswer(f"step() returned observations={output['observations']!r}; they must be a list of messages")
    action = output.get("postprocessed_action")
    if action is not None and not isinstance(action, str):
        raise InvalidAnswer(f"step() returned postprocessed_action={action!r}; it must be a string, or left out")
    metadata = output.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidAnswer(f"step() returned metadata={metadata!r}; it must be a dict, or left out")
    history = (metadata or {}).get("modified_chat_history")
    if history is not None and (not history or not is_conversation(history)):
        raise InvalidAnswer(f"step() returned modified_chat_history={history!r}; it must be a list of messages")
    return output  # type: ignore[return-value]


def reward_components(output: BaseTextEnvStepOutput) -> dict[str, float]:
    """The named parts of a turn's reward, which an environment may report as `metadata["reward_components"]`."""
    components = (output.get("metadata") or {}).get("reward_components") or {}
    if not isinstance(components, Mapping) or not all(_is_number(reward) for reward in components.values()):
        raise InvalidAnswer(f"step() returned reward_components={components!r}; they must be finite numbers by name")
    return {name: float(reward) for name, reward in components.items()}


def checked_metrics(metrics: Any) -> dict[str, Any]:
    """What `get_metrics` returned."""
    if not isinstance(metrics, dict):
        raise InvalidAnswer(f"get_metrics() returned {metrics!r}; it must be a dict")
    return metrics


def is_reward(value: Any) -> bool:
    """A finite number, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(_is_number(item) for item in value)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
