"""What an agent is given, and what it has to say when it is done."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_gym.contract import is_reward
from skyrl_train.errors import EnvError
from skyrl_train.generators.answers import weighted_reward
from skyrl_train.types import PromptRow


class NoReward(EnvError):
    """A rollout has no reward; `stop_reason` is that of the invalid trajectory."""

    def __init__(self, stop_reason: str, why: str) -> None:
        super().__init__(why)
        self.stop_reason = stop_reason


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent has to say when it is done, e.g. `AgentResult(1.0, metrics={"solved": 1})`."""

    reward: float | Sequence[float] | None  # one for all, or one for each reply in their order; None: unknown
    components: Mapping[str, float] = field(default_factory=dict)  # totals by name
    metrics: Mapping[str, Any] = field(default_factory=dict)  # `environment/*`


class Agent(Protocol):
    """A function, or an async one, that solves the task of a row with any client of OpenAI's interface.

    A blocking one runs in a thread. An async one runs in the event loop that also answers it, so it must not block.
    """

    def __call__(
        self, *, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str
    ) -> float | AgentResult | Awaitable[float | AgentResult | None] | None:
        """The reward. What is asked at `base_url` until then is the trajectory."""
        ...


def is_async(agent: Agent) -> bool:
    """Whether calling it only begins its work, which is to be awaited."""
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004


def checked_result(returned: Any, weights: Mapping[str, float]) -> AgentResult:
    """What an agent returned; where a component has a weight, the reward is the weighted sum of all of them.

    Raises:
        NoReward: it is unknown, or not what it should be.
    """
    result = returned if isinstance(returned, AgentResult) else AgentResult(returned)
    reward = list(result.reward) if isinstance(result.reward, Sequence) else result.reward
    if reward is None:
        raise NoReward("reward_unknown", "the agent returned None: the reward is unknown")
    if not isinstance(result.components, Mapping) or not isinstance(result.metrics, Mapping):
        raise NoReward("agent_error", f"the agent returned {returned!r}; components and metrics must be mappings")
    if not is_reward(reward) or (result.components and not is_reward(list(result.components.values()))):
        raise NoReward("agent_error", f"the agent returned {returned!r}; rewards must be finite numbers")
    components = {str(name): float(value) for name, value in result.components.items()}
    return AgentResult(weighted_reward(reward, components, weights), components, dict(result.metrics))
