"""Validation of values that environments return. `InvalidAnswer` describes the problem.

Environments' text enters training here, so it is cleaned here, with `skyrl_gym.runtime.text`.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import read_parts
from skyrl_gym.runtime.text import clean_strings

TRAINING_READS = ("modified_chat_history", "reward_components")
"""Keys of `metadata` that training reads."""

MAX_REWARD = 1e12
"""Maximum magnitude of a reward, so that sums of squares over a batch stay finite in float32."""


def is_conversation(value: Any) -> bool:
    """Return True for a list of chat messages. It may be empty."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )


def validate_prompt(answer: Any) -> ConversationType:
    """Return the messages in the return value of `init`."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise InvalidAnswer(f"init() returned {answer!r}; return the prompt and a dict")
    prompt, _ = answer
    if not prompt or not is_conversation(prompt):
        raise InvalidAnswer(f"init() returned prompt={prompt!r}; it must be a list of messages")
    return clean_messages(prompt)


def validate_step_output(output: Any) -> BaseTextEnvStepOutput:
    """Return the return value of `step`, whose reward may be None."""
    if not isinstance(output, dict):
        raise InvalidAnswer(f"step() returned {output!r}; return BaseTextEnvStepOutput(observations, reward, done)")
    for name in ("observations", "reward", "done"):
        if name not in output:
            raise InvalidAnswer(
                f"step() returned no {name!r}; return BaseTextEnvStepOutput(observations, reward, done)"
            )
    if output["reward"] is not None and not is_reward(output["reward"]):
        raise InvalidAnswer(
            f"step() returned reward={output['reward']!r}; it must be a finite number of magnitude <= "
            f"{MAX_REWARD:.0e}, or one for each sampled token"
        )
    if output["done"] not in (True, False):
        raise InvalidAnswer(f"step() returned done={output['done']!r}; it must be True or False")
    if not output["done"] and not is_conversation(output["observations"]):
        raise InvalidAnswer(f"step() returned observations={output['observations']!r}; they must be a list of messages")
    action = output.get("postprocessed_action")
    if action is not None and not isinstance(action, str):
        raise InvalidAnswer(f"step() returned postprocessed_action={action!r}; it must be a string or missing")
    metadata = output.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidAnswer(f"step() returned metadata={metadata!r}; it must be a dict or missing")
    history = (metadata or {}).get("modified_chat_history")
    if history is not None and (not history or not is_conversation(history)):
        raise InvalidAnswer(f"step() returned modified_chat_history={history!r}; it must be a list of messages")
    return _clean_texts(output)


def clean_messages(messages: Sequence[Mapping[str, Any]]) -> ConversationType:
    """Clean the texts of messages and read their images."""
    return [
        {**clean_strings(message), "content": clean_strings(read_parts(message["content"]))} for message in messages
    ]


def _clean_texts(output: dict[str, Any]) -> BaseTextEnvStepOutput:
    """Clean the parts of `step`'s return value that training reads."""
    metadata = output.get("metadata")
    clean: dict[str, Any] = {
        name: clean_strings(output[name]) for name in ("observations", "postprocessed_action") if name in output
    }
    if is_conversation(output.get("observations")):
        clean["observations"] = clean_messages(output["observations"])
    if metadata is not None:
        read = {name: clean_strings(metadata[name]) for name in TRAINING_READS if name in metadata}
        if read.get("modified_chat_history") is not None:
            read["modified_chat_history"] = clean_messages(metadata["modified_chat_history"])
        clean["metadata"] = {**metadata, **read}
    return {**output, **clean}  # type: ignore[typeddict-item]


def reward_components(output: BaseTextEnvStepOutput) -> dict[str, float]:
    """Return the named parts of a turn's reward, from `metadata["reward_components"]`."""
    components = (output.get("metadata") or {}).get("reward_components") or {}
    if not isinstance(components, Mapping) or not all(_is_number(reward) for reward in components.values()):
        raise InvalidAnswer(f"step() returned reward_components={components!r}; it must map names to finite numbers")
    return {str(name): float(reward) for name, reward in components.items()}


def validate_metrics(metrics: Any) -> dict[str, Any]:
    """Return the return value of `get_metrics`."""
    if not isinstance(metrics, dict):
        raise InvalidAnswer(f"get_metrics() returned {metrics!r}; it must be a dict")
    return metrics


def validate_reward(reward: Any, method: str) -> float | None:
    """Return the return value of `method`, a number, or None for an unknown reward."""
    if reward is not None and not _is_number(reward):
        raise InvalidAnswer(f"{method}() returned {reward!r}; return a finite number of magnitude <= {MAX_REWARD:.0e}")
    return None if reward is None else float(reward)


def is_reward(value: Any) -> bool:
    """Return True for a number of magnitude <= `MAX_REWARD`, or a non-empty list of them."""
    if isinstance(value, list):
        return bool(value) and all(_is_number(item) for item in value)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and abs(value) <= MAX_REWARD  # type: ignore[operator]  # False for NaN
