"""Base class for text environments: the model's reply goes in, chat messages come out."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from skyrl_gym.core import Env, EnvStepOutput
from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_gym.tools.core import ToolGroup
from skyrl_gym.tools.messages import ConversationType as ConversationType
from skyrl_gym.tools.messages import MessageType as MessageType


class BaseTextEnvStepOutput(EnvStepOutput[ConversationType], total=False):
    """An `EnvStepOutput` of chat messages. `observations` are appended to the conversation after the model's reply.

    postprocessed_action: what the environment made of the reply, if different. A prefix of the
        reply is trained on as sampled. Any other text replaces the reply in the conversation and is not trained on.
    """

    postprocessed_action: str | None


class BaseTextEnv(Env[ConversationType, str]):
    """An episode of chat. Subclasses override `step` and count their own turns.

    Built as ``YourEnv(env_config=…, extras=…)``: `env_config` is the configuration section named after the environment,
    `extras` is the dataset row without `prompt` and `env_class`, plus the trainer's ``max_turns`` and ``reads_images``.
    """

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Start the episode with the row's prompt. A subclass may return a different prompt."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Process the model's reply: `action` is the decoded text of one turn."""
        raise NotImplementedError(f"{type(self).__name__} must implement step()")

    def close(self) -> None:
        """Release the tools' resources. Idempotent."""
        with ExitStack() as groups:  # closes every group even if one raises
            for group in self.tool_groups:
                groups.callback(group.close)

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Set the tool groups. If two tools share a name, the last one wins."""
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
        """Return this episode's metrics, e.g. ``{"steps": 5, "caught": 0, "failure": "missed by 2"}``.

        Numbers are averaged over episodes. The text ``failure`` groups failed episodes in reports by their reason.
        """
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Aggregate the `get_metrics` of several episodes. The default is the mean of every number."""
        return default_aggregate_metrics(metrics)
