"""The base class of text environments: the model's reply goes in, chat messages come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from skyrl_gym.core import Env, EnvStepOutput
from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_gym.tools.core import ToolGroup

MessageType = dict[str, Any]
"""One chat message: ``role`` and ``content``, and whatever else the chat template understands (``tool_calls``, …)."""

ConversationType = list[MessageType]


class BaseTextEnvStepOutput(EnvStepOutput[ConversationType], total=False):
    """`EnvStepOutput` over chat messages: `observations` are appended to the conversation after the model's reply.

    postprocessed_action: the reply as the environment understood it, if that differs from the reply. A prefix of the
        reply is trained on as sampled; any other text replaces it in the conversation and is not trained on.
    """

    postprocessed_action: str | None


class BaseTextEnv(Env[ConversationType, str]):
    """An episode of chat. Subclasses override `step`, and count their turns in it.

    A subclass is built as ``YourEnv(env_config=…, extras=…)``: `env_config` is the section of the configuration named
    after the environment, `extras` is the dataset row without `prompt` and `env_class`, with the trainer's own
    ``max_turns`` added.
    """

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Start the episode with the row's prompt. A subclass may return another prompt."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Process the model's reply `action`, the decoded text of one turn."""
        raise NotImplementedError(f"{type(self).__name__} must implement step()")

    def close(self) -> None:
        """Release the resources of the tools. Calling it again does nothing."""
        with ExitStack() as groups:  # closes all of them even if one raises
            for group in self.tool_groups:
                groups.callback(group.close)

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Set the tool groups. Of two tools with the same name, the last one counts."""
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {}
        for group in tool_groups:
            self.tool_to_toolgroup.update(group.get_tool_to_group_mapping())

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Call a tool with the arguments `tool_input`. Raises ValueError if the group or tool does not exist."""
        group = next((group for group in self.tool_groups if group.get_name() == tool_group_name), None)
        if group is None:
            raise ValueError(f"ToolGroup '{tool_group_name}' not found.")
        return group.execute_tool(tool_name, *tool_input)

    def get_metrics(self) -> dict[str, Any]:
        """Return the metrics of this episode, e.g. ``{"steps": 5, "caught": 1}``."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Aggregate the `get_metrics` of several episodes; by default, return the mean of every number."""
        return default_aggregate_metrics(metrics)
