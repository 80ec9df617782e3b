"""Episodes in which the model calls tools until it has an answer."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, without_thoughts
from skyrl_gym.tools.core import ToolGroup

INSTRUCTIONS = """# Tools

You can call these functions, which are described in JSON Schema:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments between tags. You may call several in one reply:
<tool_call>
{{"name": "<name>", "arguments": {{"<argument>": "<value>"}}}}
</tool_call>

A reply without a call is your answer."""


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

    def __init__(self, tool_groups: Sequence[ToolGroup], max_turns: int) -> None:
        super().__init__()
        self.max_turns = max_turns
        self.init_tool_groups(tool_groups)
        self._n_calls = 0
        self._n_errors = 0

    @abstractmethod
    def score(self, answer: str) -> float | None:
        """The reward of the answer, without its thoughts; it is empty when turns ran out. None: nobody can tell."""

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """The prompt, with the tools in its system message."""
        schemas = [schema for group in self.tool_groups for schema in group.get_schemas()]
        told = INSTRUCTIONS.format(tools="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
        if prompt and prompt[0]["role"] == "system":
            system = {**prompt[0], "content": f"{prompt[0]['content']}\n\n{told}"}
            return [system, *prompt[1:]], {}
        return [{"role": "system", "content": told}, *prompt], {}

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
        text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": text}], reward=0.0, done=False, metadata=metadata
        )

    def _carry_out(self, call: ToolCall) -> str:
        self._n_calls += 1
        try:
            group = self._group_of(call)
            return group.call(call.name, call.arguments)
        except (ToolFailure, ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001, the boundary of a tool
            self._n_errors += 1
            return f"Error: {error}"

    def _group_of(self, call: ToolCall) -> ToolGroup:
        name = self.tool_to_toolgroup.get(call.name)
        for group in self.tool_groups:
            if group.get_name() == name:
                return group
        known = ", ".join(sorted(self.tool_to_toolgroup)) or "none"
        raise ToolCallError(f"There is no tool {call.name!r}. Tools: {known}.")
