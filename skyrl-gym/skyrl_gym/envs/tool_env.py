"""Episodes in which the model calls tools until it has an answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, strip_thoughts
from skyrl_gym.tools.core import ToolGroup
from skyrl_gym.tools.messages import append_to_system, format_tool_response, format_tools_prompt, shorten_result

ANSWER_INSTRUCTION = "A reply without a call is your answer."


class ToolEnv(BaseTextEnv):
    """An environment in which the model calls tools, one or several per reply, until it answers without a call.

        class Exam(ToolEnv):
            def __init__(self, env_config, extras):
                super().__init__([Library()], max_turns=8)
                self.truth = extras["reward_spec"]["ground_truth"]

            def score(self, answer):
                return float(answer.strip() == self.truth)

    The system message describes the tools in the format that Qwen and Hermes models were trained on; calls may be
    written in any marked format of `skyrl_gym.tools.calls`. Calls are executed in order. The error of a wrong call, or
    of a tool that raises, is the observation. If one call of a reply cannot be parsed, for example because it is cut
    off, none is executed. A `ToolFailure`, a connection error or a timeout is not the model's fault and is raised. Of a
    long result, the model reads the beginning and the end.
    """

    DUPLICATE_FIX = "use skyrl_gym.tools.Prefixed(group, {group!r}) to prefix the tool names of one group"
    """The fix for two tools with the same name, for the error message."""

    def __init__(self, tool_groups: Sequence[ToolGroup], max_turns: int) -> None:
        """Take ownership of the groups; they are closed with the environment, also if the constructor raises.

        Raises:
            ValueError: two tools have the same name.
        """
        super().__init__()
        self.max_turns = max_turns
        self._groups: Mapping[str, ToolGroup] = {}
        try:
            self.init_tool_groups(tool_groups)
        except BaseException:
            self.close()
            raise
        self._n_calls = 0
        self._n_errors = 0

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Set the tool groups. Raises ValueError if two tools have the same name, by which the model calls them."""
        super().init_tool_groups(tool_groups)
        groups: dict[str, ToolGroup] = {}
        for group in tool_groups:
            for name in group.get_tool_names():
                if name in groups:
                    first, second = groups[name].get_name(), group.get_name()
                    fix = self.DUPLICATE_FIX.format(group=second)
                    raise ValueError(f"{first!r} and {second!r} both have a tool {name!r}; {fix}")
                groups[name] = group
        self._groups = groups

    @abstractmethod
    def score(self, answer: str) -> float | None:
        """Return the reward of the answer, or None if it is unknown.

        The answer does not include thoughts, and is empty if the turns ran out.
        """

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the prompt with the tools in its system message."""
        schemas = [schema for group in self.tool_groups for schema in group.get_schemas()]
        return append_to_system(prompt, f"{format_tools_prompt(schemas)}\n\n{ANSWER_INSTRUCTION}"), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the calls, or score the answer."""
        self.turns += 1
        try:
            calls = parse_tool_calls(action)
        except ToolCallError as error:
            self._n_errors += 1
            return self._next_turn([f"Error: {error}"], [])
        if not calls:
            answer = strip_thoughts(action).strip()
            return BaseTextEnvStepOutput(
                observations=[], reward=self.score(answer), done=True, metadata={"answer": answer}
            )
        if self.turns >= self.max_turns:
            return self._next_turn([], calls)
        return self._next_turn([self._execute(call) for call in calls], calls)

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns, of tool calls, and of tool calls that failed."""
        return {"steps": self.turns, "tool_calls": self._n_calls, "tool_errors": self._n_errors}

    def _next_turn(self, results: Sequence[str], calls: Sequence[ToolCall]) -> BaseTextEnvStepOutput:
        metadata = {"tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls]}
        if self.turns >= self.max_turns:
            return BaseTextEnvStepOutput(observations=[], reward=self.score(""), done=True, metadata=metadata)
        text = "\n".join(map(format_tool_response, results))
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": text}], reward=0.0, done=False, metadata=metadata
        )

    def _execute(self, call: ToolCall) -> str:
        self._n_calls += 1
        try:
            return shorten_result(self._find_group(call).call(call.name, call.arguments))
        except (ToolFailure, ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001, the boundary of a tool
            self._n_errors += 1
            return shorten_result(f"Error: {error}")

    def _find_group(self, call: ToolCall) -> ToolGroup:
        if call.name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise ToolCallError(f"There is no tool {call.name!r}. Tools: {known}.")
        return self._groups[call.name]
