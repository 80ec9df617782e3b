"""Base class for environments where the model calls tools until it answers."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, strip_thoughts
from skyrl_gym.tools.core import ToolGroup
from skyrl_gym.tools.messages import (
    Content,
    append_to_system,
    format_tool_response,
    format_tools_prompt,
    join_contents,
    shorten_result,
)

ANSWER_INSTRUCTION = "A reply without a call is your answer."


class ToolEnv(BaseTextEnv):
    """An environment where the model calls tools until it gives an answer. A reply may hold several calls.

        class Exam(ToolEnv):
            def __init__(self, env_config, extras):
                super().__init__([Library()], max_turns=8)
                self.truth = extras["reward_spec"]["ground_truth"]

            def score(self, answer):
                return float(answer.strip() == self.truth)

    The system message describes the tools in the format that Qwen and Hermes models were trained on, but the model may
    write calls in any format of `skyrl_gym.tools.calls`. They are executed in order. If a call is wrong or a tool
    raises, the model reads the error as the observation. If one call of a reply cannot be parsed, e.g. because it is
    cut off, none is executed. A `ToolFailure`, a connection error or a timeout is not the model's fault, so it is
    raised. Long results are cut in the middle.
    """

    DUPLICATE_FIX = "use skyrl_gym.tools.Prefixed(group, {group!r}) to prefix the tool names of one group"
    """Fix to suggest if two tools have the same name."""

    def __init__(self, tool_groups: Sequence[ToolGroup], max_turns: int) -> None:
        """Take ownership of the groups, so that they are closed with the environment, even if the constructor raises.

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
        """Set the tool groups. Raises ValueError if two tools have the same name, since models call them by name."""
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

        `answer` excludes thoughts, and is empty if the turns ran out.
        """

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the prompt with the tools described in its system message."""
        schemas = [schema for group in self.tool_groups for schema in group.get_schemas()]
        return append_to_system(prompt, f"{format_tools_prompt(schemas)}\n\n{ANSWER_INSTRUCTION}"), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the calls, or score the answer if there are none."""
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
        """Return the numbers of turns, tool calls and failed tool calls."""
        return {"steps": self.turns, "tool_calls": self._n_calls, "tool_errors": self._n_errors}

    def _next_turn(self, results: Sequence[Content], calls: Sequence[ToolCall]) -> BaseTextEnvStepOutput:
        metadata = {"tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls]}
        if self.turns >= self.max_turns:
            return BaseTextEnvStepOutput(observations=[], reward=self.score(""), done=True, metadata=metadata)
        content = join_contents([format_tool_response(result) for result in results])
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": content}], reward=0.0, done=False, metadata=metadata
        )

    def _execute(self, call: ToolCall) -> Content:
        self._n_calls += 1
        try:
            if call.name not in self._groups:
                known = ", ".join(sorted(self._groups)) or "none"
                raise ToolCallError(f"There is no tool {call.name!r}. Tools: {known}.")
            result = self._groups[call.name].call(call.name, call.arguments)
            if isinstance(result, str):
                return shorten_result(result)
            return [{**part, "text": shorten_result(part["text"])} if "text" in part else part for part in result]
        except (ToolFailure, ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001, the boundary of a tool
            self._n_errors += 1
            return shorten_result(f"Error: {error}")
