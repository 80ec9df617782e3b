"""Environments written for TRL's `environment_factory`: a class whose public methods are the tools of the model.

    environment.env_class=trl environment.skyrl_gym.trl.factory=my_package.echo:EchoEnv

with, for instance,

    class EchoEnv:
        def reset(self, **row) -> str | None:
            self.reward = 0.0
            return "Say something long."

        def echo(self, message: str) -> str:
            '''Say something, and hear it back.

            Args:
                message: what to say
            '''
            self.reward = len(message) / 100
            return message
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import FunctionType
from typing import Any

from skyrl_gym.adapters.actions import ActionError, calls_in
from skyrl_gym.adapters.background_loop import BackgroundLoop
from skyrl_gym.adapters.observations import as_text, user_message, with_observation
from skyrl_gym.adapters.settings import max_turns, read_settings
from skyrl_gym.entry_point import load_attribute
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.tools.calls import ToolCall, ToolCallError
from skyrl_gym.tools.messages import readable, tool_response, tools_prompt, with_system
from skyrl_gym.tools.schema import Signature

NO_TOOLS = {"reset", "get_reward", "close"}
"""Public methods that are for us, and not for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlSettings:
    """The section `environment.skyrl_gym.trl`.

    factory: the class, or a function that returns the environment, as ``module:name``.
    kwargs: its arguments; TRL calls it without any.
    describe_tools: whether the system prompt lists the tools.
    missing_reward: the reward where the environment has none; None makes its rollout invalid.
    """

    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    describe_tools: bool = True
    missing_reward: float | None = None


class TrlEnv(BaseTextEnv):
    """One episode: the model calls tools, until a reply has no call, or the environment's `done` is True.

    `reset` is called with the columns of the row, and what it returns is appended to the prompt. The reward comes at
    the end: what `get_reward()` returns, or the attribute `reward`.

    What a tool raises is told to the model, as in TRL. Errors of connections and timeouts are not: they fail the
    rollout. Methods may be `async`; those of an episode share an event loop. A `close` is called at the end.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = read_settings(TrlSettings, "trl", env_config, extras)
        self.max_turns = max_turns(extras)
        self._row = {name: value for name, value in extras.items() if name != "max_turns"}
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
            raise ValueError(f"{self.settings.factory} has no tools: give it public methods besides reset")

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Reset the environment; tools go into the system prompt, what `reset` says to the end of the prompt."""
        first = self._call(self._env.reset, _accepted(self._env.reset, {"prompt": prompt, **self._row}))
        if first is not None and not isinstance(first, str):
            raise ValueError(f"reset of {self.settings.factory} returned {first!r}; it must be a text or None")
        if self.settings.describe_tools:
            prompt = with_system(prompt, tools_prompt([tool.schema for tool in self._tools.values()]))
        return with_observation(prompt, readable(first or "")), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Carry out the calls in a reply, in order."""
        if self._is_done or self._is_closed:
            raise RuntimeError("this episode is over; make a new TrlEnv for the next one")
        self.turns += 1
        texts, is_over = self._answers(action)
        self._is_done = is_over or self.turns >= self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if self._is_done else [user_message(readable("\n".join(texts)))],
            reward=self._reward() if self._is_done else 0.0,
            done=self._is_done,
            metadata={},
        )

    def close(self) -> None:
        """Close the environment, if it can be closed. Calling it again does nothing."""
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
        """Turns, calls of tools, those that raised, and replies or calls that could not be carried out."""
        return {
            "steps": self.turns,
            "tool_calls": self._n_calls,
            "failed_tool_calls": self._n_failed,
            "invalid_actions": self._n_invalid,
        }

    def _answers(self, reply: str) -> tuple[list[str], bool]:
        """What the model reads after a reply, and whether the episode is over."""
        try:
            calls = calls_in(reply)
        except ActionError as problem:
            self._n_invalid += 1
            return [str(problem)], False
        texts = [tool_response(self._answer(call)) for call in calls]
        return texts, not calls or _is_true(getattr(self._env, "done", False))

    def _answer(self, call: ToolCall) -> str:
        """What a tool answers, or why it does not."""
        tool = self._tools.get(call.name)
        if tool is None:
            self._n_invalid += 1
            return f"Error: there is no tool {call.name}; there are {', '.join(self._tools)}."
        try:
            arguments = tool.check(call.arguments)
        except ToolCallError as problem:
            self._n_invalid += 1
            return f"Error: {problem}"
        self._n_calls += 1
        try:
            return as_text(self._call(getattr(self._env, call.name), arguments))
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
        """What a method returns; one that is `async`, or wraps such a one, runs in the episode's event loop."""
        answer = method(**arguments)
        if not inspect.isawaitable(answer):
            return answer
        self._loop = self._loop or BackgroundLoop("trl")
        return self._loop.run(_awaited(answer))


def _is_true(value: Any) -> bool:
    """Whether a value is True, of Python or of numpy; a tool that is called `done` is not."""
    item = getattr(value, "item", None)
    return (item() if callable(item) else value) is True


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _tools(env: Any) -> dict[str, Signature]:
    """The public methods of an environment, by name."""
    return {
        name: Signature(name, getattr(env, name))
        for name, member in inspect.getmembers_static(type(env))
        if isinstance(member, FunctionType | staticmethod | classmethod)
        and not name.startswith("_")
        and name not in NO_TOOLS
    }


def _accepted(method: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a method has a name for; all of them, where it takes `**row`."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
