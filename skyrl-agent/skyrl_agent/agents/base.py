"""The interface of agents."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skyrl_agent.chat import Chat
from skyrl_agent.config import AgentGeneration
from skyrl_agent.tools.base import BaseTool, create_tools
from skyrl_train.errors import ConfigError
from skyrl_train.generators.env_pool import EnvTimeout, ThreadPool


async def call_with_limit(threads: ThreadPool, function: Callable[[], Any], limit_s: float) -> Any:
    """Return the result of a function, which may block or return an awaitable.

    Raises:
        EnvTimeout: it exceeded the limit, which is that of `threads`, too.
        Exception: its error; an error that is no `Exception` becomes a RuntimeError.
    """
    result = await threads.run(function)
    if not inspect.isawaitable(result):
        return result
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await result
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EnvTimeout(f"the call did not return within {limit_s:g} s") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the call raised CancelledError") from error


@dataclass(slots=True)
class Outcome:
    """The end of an agent's work."""

    finish_reason: str  # e.g. "FINISH_TOOL" or "max_iterations_reached"
    result: Any = None  # what the task evaluates, e.g. an answer


@dataclass(slots=True)
class AgentContext:
    """The chat, tools, settings and instance of one trajectory."""

    chat: Chat  # begins with the task's instruction
    tools: Mapping[str, BaseTool]
    settings: AgentGeneration
    instance: Any
    trajectory_id: str
    runtime: Any  # of the task, e.g. a container
    tool_threads: ThreadPool
    tool_calls: dict[str, int] = field(default_factory=dict)  # number of calls of each tool


class BaseAgent(ABC):
    """An agent. A new one is created for each trajectory.

    Subclasses implement `run`: they call `self.chat.generate`, as often as they like, and return an `Outcome`.
    """

    def __init__(self, context: AgentContext) -> None:
        """Set the context."""
        self.context = context
        self.chat = context.chat
        self.instance = context.instance

    @classmethod
    def create_tools(cls, tools: Any) -> dict[str, BaseTool]:
        """Create the tools of a trajectory from the `tools` of the task file. ConfigError for invalid ones."""
        if isinstance(tools, Mapping):
            raise ConfigError(f"tools: {cls.__name__} takes a list of tools; got the section {dict(tools)}")
        return create_tools(tools)

    async def call_tool(self, tool: BaseTool, arguments: dict[str, Any]) -> Any:
        """Return the result of a tool, whose `call` runs in a thread.

        Raises:
            ToolCallError: the arguments do not match the tool; the message is for the model.
            EnvTimeout: the call exceeded `generator.tool_timeout`.
        """
        arguments = tool.check(arguments)
        self.context.tool_calls[tool.name] = self.context.tool_calls.get(tool.name, 0) + 1
        call = partial(tool.call, arguments, agent=self, trajectory_id=self.context.trajectory_id)
        return await call_with_limit(self.context.tool_threads, call, self.context.settings.tool_timeout)

    def set_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Start another history, e.g. from a tool."""
        self.chat.reset(messages)

    @abstractmethod
    async def run(self) -> Outcome:
        """Work on the task until it is finished or given up."""
