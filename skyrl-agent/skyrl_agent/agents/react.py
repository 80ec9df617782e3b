"""ReAct: the model thinks, calls a tool, reads the result, and repeats (Yao et al., 2022, arXiv:2210.03629)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from skyrl_agent.agents.base import AgentContext, BaseAgent, Outcome
from skyrl_agent.chat import ChatReply, ContextWindowExceeded
from skyrl_agent.tools.base import format_tools
from skyrl_gym.error import EnvTimeout, ToolFailure
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.tools.calls import CUT_OFF, ToolCall, ToolCallError, parse_tool_calls, strip_thoughts
from skyrl_gym.tools.messages import append_to_system, shorten_result
from skyrl_train.errors import EngineError

NO_CALL = "Your reply has no function call. Call one function, or finish with: {finish}"
SEVERAL_CALLS = "Your reply has {n} function calls, and none was carried out. Call one function in each reply."


class ReActAgent(BaseAgent):
    """An agent that makes one tool call per turn, in a format of `skyrl_gym.tools.calls`.

    Without tools, its first reply is the result. If a call fails or cannot be parsed, the model reads why.
    """

    max_repeats: ClassVar[int | None] = None
    """Default of `generator.max_repeats`. None means no limit."""

    def __init__(self, context: AgentContext) -> None:
        """Describe the tools in the system message."""
        super().__init__(context)
        self._last: tuple[ToolCall, str] | None = None  # call and observation
        self._n_repeats = 0
        chosen = context.settings.max_repeats
        self._max_repeats = self.max_repeats if chosen is None else chosen or None
        self.set_history(self.chat.messages)

    def set_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the history. Its system message gets the descriptions of the tools."""
        description = format_tools(self.context.tools.values())
        self.chat.reset(append_to_system([dict(message) for message in messages], description))

    async def run(self) -> Outcome:
        """Take turns until a tool finishes, or no turns are left."""
        n_turns = self.context.settings.max_iterations
        for turn in range(1, n_turns + 1):
            reply = await self.chat.generate()
            if not self.context.tools:
                return Outcome("FINISH", strip_thoughts(reply.text).strip())
            outcome = await self._act(reply)
            if outcome is not None:
                return outcome
            if self._max_repeats is not None and self._n_repeats >= self._max_repeats:
                return Outcome("stuck_in_a_loop")
            self._remind(turn, n_turns)
        return Outcome("max_iterations_reached")

    async def _act(self, reply: ChatReply) -> Outcome | None:
        """Execute the call in a reply and add its result to the history. Return the outcome if it was the last call."""
        tools, call = self.context.tools, None
        try:
            calls = parse_tool_calls(reply.text, is_truncated=reply.is_truncated)
            if len(calls) > 1:
                raise ToolCallError(SEVERAL_CALLS.format(n=len(calls)))
            if not calls and reply.is_truncated:
                raise ToolCallError(CUT_OFF)
            if not calls:
                finish = next((tool.name for tool in tools.values() if tool.ends_trajectory), "finish")
                raise ToolCallError(NO_CALL.format(finish=f"<function={finish}>"))
            call = calls[0]
            if call.name not in tools:
                raise ToolCallError(f"There is no function {call.name}; there are {', '.join(tools)}.")
            tool = tools[call.name]
            result = await self.call_tool(tool, call.arguments)
            if tool.ends_trajectory:
                return Outcome("FINISH_TOOL", result)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except EnvTimeout:
            return Outcome("cmd_timeout")
        except (ToolFailure, EngineError, ContextWindowExceeded):
            raise
        except Exception as error:  # noqa: BLE001, the model reads it
            self._observe(call, f"ERROR: {error if isinstance(error, ToolCallError) else describe_error(error)}")
            return None
        if result is not None or not self.chat.has_new_messages:  # a tool that rewrote the history returns None
            self._observe(call, text)
        return None

    def _observe(self, call: ToolCall | None, observation: str) -> None:
        observation = shorten_result(observation)
        if call is not None:
            is_repeated = self._last == (call, observation)
            self._last, self._n_repeats = (call, observation), self._n_repeats + 1 if is_repeated else 1
            observation = f"EXECUTION RESULT of [{call.name}]:\n{observation}"
        self.chat.append("user", observation)

    def _remind(self, turn: int, n_turns: int) -> None:
        """With `enable_turn_reminder`, append the number of remaining turns to the last message."""
        settings = self.context.settings
        if not settings.enable_turn_reminder or turn == n_turns:
            return
        reminder = f"Steps remaining: {n_turns - turn}."
        if turn < settings.early_step_threshold:
            reminder += f" Take at least {settings.early_step_threshold - turn} more steps before you finish."
        elif turn == n_turns - 1:
            reminder += " This is your last step: finish now."
        self.chat.append_to_last(reminder)
