"""Environments written for TRL's `environment_factory`: a class whose public methods are the model's tools.

    environment.env_class=trl environment.skyrl_gym.trl.factory=my_package.echo:EchoEnv

with, for example,

    class EchoEnv:
        def reset(self, **row) -> str | None:
            self.reward = 0.0
            return "Say something long."

        def echo(self, message: str) -> str:
            '''Repeat a message.

            Args:
                message: the text to repeat
            '''
            self.reward = len(message) / 100
            return message
"""

import inspect
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import FunctionType
from typing import Any

from skyrl_gym.adapters.actions import ActionError, parse_calls
from skyrl_gym.adapters.background_loop import BackgroundLoop
from skyrl_gym.adapters.observations import append_observation, format_value, user_message
from skyrl_gym.adapters.settings import NO_LIMIT, read_settings
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.entry_point import load_attribute, select_arguments
from skyrl_gym.envs.row import TRAINER_FIELDS, read_max_turns
from skyrl_gym.tools.calls import ToolCall, ToolCallError
from skyrl_gym.tools.messages import append_to_system, format_tool_response, format_tools_prompt
from skyrl_gym.tools.schema import Signature

NON_TOOL_METHODS = {"reset", "get_reward", "close"}
"""Public methods that are not tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlSettings:
    """The section `environment.skyrl_gym.trl`.

    factory: the class, or a function that returns the environment, as ``module:name``.
    kwargs: the arguments of `factory`. TRL calls it without any.
    describe_tools: True to list the tools in the system prompt.
    missing_reward: the reward if the environment returns no reward. None makes the rollout invalid.
    """

    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    describe_tools: bool = True
    missing_reward: float | None = None


class TrlEnv(BaseTextEnv):
    """One episode: the model calls tools until a reply has no call, the environment's `done` is True, or turns run out.

    `reset` gets the row's columns, and its result is appended to the prompt. The final reward is the result of
    `get_reward()`, or the attribute `reward`.

    As in TRL, the model sees errors that tools raise. Connection errors and timeouts fail the rollout instead. Methods
    may be `async`: an episode runs them all in one event loop. `close`, if any, is called at the end.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = read_settings(TrlSettings, "trl", env_config, extras)
        self.max_turns = read_max_turns(extras, NO_LIMIT)
        self._row = {name: value for name, value in extras.items() if name not in TRAINER_FIELDS}
        self._env: Any = load_attribute(self.settings.factory)(**self.settings.kwargs)
        self._loop: BackgroundLoop | None = None
        self._n_calls = 0
        self._n_failed = 0
        self._n_invalid = 0
        self._is_done = False
        self._is_closed = False
        self._tools = _tools(self._env)
        if not self._tools:
            self.close()
            raise ValueError(f"{self.settings.factory} has no tools; add public methods besides reset")

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Reset the environment. Add the tools to the system prompt, and the result of `reset` to the prompt."""
        first = self._call(self._env.reset, select_arguments(self._env.reset, {"prompt": prompt, **self._row}))
        if first is not None and not isinstance(first, str):
            raise ValueError(f"reset of {self.settings.factory} returned {first!r}; it must be a string or None")
        if self.settings.describe_tools:
            prompt = append_to_system(prompt, format_tools_prompt([tool.schema for tool in self._tools.values()]))
        return append_observation(prompt, first or ""), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the calls in a reply, in order. At the end of the episode, return its reward instead of results."""
        if self._is_done or self._is_closed:
            raise RuntimeError("this episode is over; create a new TrlEnv for the next episode")
        self.turns += 1
        texts, is_over = self._execute_calls(action)
        self._is_done = is_over or self.turns >= self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if self._is_done else [user_message("\n".join(texts))],
            reward=self._reward() if self._is_done else 0.0,
            done=self._is_done,
            metadata={},
        )

    def close(self) -> None:
        """Close the environment, if it has a `close`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if callable(close := getattr(self._env, "close", None)):
                self._call(close, {})
        finally:
            if self._loop is not None:
                self._loop.close()

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns, tool calls, calls that raised, and invalid replies or calls."""
        return {
            "steps": self.turns,
            "tool_calls": self._n_calls,
            "failed_tool_calls": self._n_failed,
            "invalid_actions": self._n_invalid,
        }

    def _execute_calls(self, reply: str) -> tuple[list[str], bool]:
        """Execute the calls in a reply. Return their results, and True if there is no call or `done` is True."""
        try:
            calls = parse_calls(reply)
        except ActionError as problem:
            self._n_invalid += 1
            return [str(problem)], False
        texts = [format_tool_response(self._execute(call)) for call in calls]
        return texts, not calls or _is_true(getattr(self._env, "done", False))

    def _execute(self, call: ToolCall) -> str:
        """Execute a call. Return its result or its error as text."""
        tool = self._tools.get(call.name)
        if tool is None:
            self._n_invalid += 1
            return f"Error: there is no tool {call.name}; the tools are {', '.join(self._tools)}."
        try:
            arguments = tool.check(call.arguments)
        except ToolCallError as problem:
            self._n_invalid += 1
            return f"Error: {problem}"
        self._n_calls += 1
        try:
            return format_value(self._call(getattr(self._env, call.name), arguments))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as problem:  # noqa: BLE001, the boundary of a user's tool
            self._n_failed += 1
            return f"Error: {problem}"

    def _reward(self) -> float | None:
        own = getattr(self._env, "get_reward", None)
        reward = self._call(own, {}) if callable(own) else getattr(self._env, "reward", None)
        if reward is None:
            return self.settings.missing_reward
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(f"the reward of {self.settings.factory} is {reward!r}; it must be a finite number or None")
        return float(reward)

    def _call(self, method: Any, arguments: Mapping[str, Any]) -> Any:
        """Call a method. Await the result in the episode's event loop if it is awaitable."""
        answer = method(**arguments)
        if not inspect.isawaitable(answer):
            return answer
        self._loop = self._loop or BackgroundLoop("trl")
        return self._loop.run(_await(answer))


def _is_true(value: Any) -> bool:
    """Return True for Python's or numpy's True, but not for a tool named `done`."""
    item = getattr(value, "item", None)
    return (item() if callable(item) else value) is True


async def _await(answer: Awaitable[Any]) -> Any:
    return await answer


def _tools(env: Any) -> dict[str, Signature]:
    """Return an environment's tools by name: its public methods except `NON_TOOL_METHODS`."""
    return {
        name: Signature(name, getattr(env, name))
        for name, member in inspect.getmembers_static(type(env))
        if isinstance(member, FunctionType | staticmethod | classmethod)
        and not name.startswith("_")
        and name not in NON_TOOL_METHODS
    }
