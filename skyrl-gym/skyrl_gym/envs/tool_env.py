"""Episodes in which the model calls tools until it has an answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, without_thoughts
from skyrl_gym.tools.core import ToolGroup
from skyrl_gym.tools.messages import tool_response, tools_prompt, with_system

ANSWER = "A reply without a call is your answer."


class ToolEnv(BaseTextEnv):
    """The model may call the tools of its groups, side by side if it likes, and answers with a reply that calls none.

        class Exam(ToolEnv):
            def __init__(self, env_config, extras):
                super().__init__([Library()], max_turns=8)
                self.truth = extras["reward_spec"]["ground_truth"]

            def score(self, answer):
                return float(answer.strip() == self.truth)

    The tools are told in the system message, in the format that Qwen and Hermes models were trained on; calls may also
    be written as `<function=name><parameter=…>`. They are carried out in order. One that is wrong or whose tool raises
    is explained to the model; of a reply in which one cannot be read, none is carried out. A `ToolFailure`, an error
    of a connection or a timeout is not the model's, and is raised.
    """

    WAY_OUT = "skyrl_gym.tools.Prefixed(group, {group!r}) gives those of one group names of their own"
    """What the author of two tools with one name can do."""

    def __init__(self, tool_groups: Sequence[ToolGroup], max_turns: int) -> None:
        """The groups belong to the environment, which closes them, also where it refuses them.

        Raises:
            ValueError: two of their tools have one name.
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

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup]) -> None:
        """Offer the tools of these groups. Raises ValueError where two have one name: the model knows no other."""
        super().init_tool_groups(tool_groups)
        groups: dict[str, ToolGroup] = {}
        for group in tool_groups:
            for name in group.get_tool_names():
                if name in groups:
                    one, other = groups[name].get_name(), group.get_name()
                    way_out = self.WAY_OUT.format(group=other)
                    raise ValueError(
                        f"{one!r} and {other!r} both have a tool {name!r}, and it is called by name; {way_out}"
                    )
                groups[name] = group
        self._groups = groups

    @abstractmethod
    def score(self, answer: str) -> float | None:
        """The reward of the answer, without its thoughts; it is empty when turns ran out. None: nobody can tell."""

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """The prompt, with the tools in its system message."""
        schemas = [schema for group in self.tool_groups for schema in group.get_schemas()]
        return with_system(prompt, f"{tools_prompt(schemas)}\n\n{ANSWER}"), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Carry calls out, or score the answer."""
        self.turns += 1
        try:
            calls = parse_tool_calls(action)
        except ToolCallError as error:
            self._n_errors += 1
            return self._go_on([f"Error: {error}"], [])
        if not calls:
            answer = without_thoughts(action).strip()
            return BaseTextEnvStepOutput(
                observations=[], reward=self.score(answer), done=True, metadata={"answer": answer}
            )
        if self.turns >= self.max_turns:
            return self._go_on([], calls)
        return self._go_on([self._carry_out(call) for call in calls], calls)

    def get_metrics(self) -> dict[str, Any]:
        """Turns, calls, and how many of them were wrong."""
        return {"steps": self.turns, "tool_calls": self._n_calls, "tool_errors": self._n_errors}

    def _go_on(self, results: Sequence[str], calls: Sequence[ToolCall]) -> BaseTextEnvStepOutput:
        metadata = {"tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls]}
        if self.turns >= self.max_turns:
            return BaseTextEnvStepOutput(observations=[], reward=self.score(""), done=True, metadata=metadata)
        text = "\n".join(map(tool_response, results))
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": text}], reward=0.0, done=False, metadata=metadata
        )

    def _carry_out(self, call: ToolCall) -> str:
        self._n_calls += 1
        try:
            return self._group_of(call).call(call.name, call.arguments)
        except (ToolFailure, ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001, the boundary of a tool
            self._n_errors += 1
            return f"Error: {error}"

    def _group_of(self, call: ToolCall) -> ToolGroup:
        if call.name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise ToolCallError(f"There is no tool {call.name!r}. Tools: {known}.")
        return self._groups[call.name]
