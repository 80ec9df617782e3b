"""Base class for agents."""

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from skyrl_agent.tools.base import AgentContext, BaseTool, create_tools
from skyrl_gym.runtime.env_pool import ThreadPool, await_with_timeout, errors_as_exceptions
from skyrl_train.errors import ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def call_with_limit(
    threads: ThreadPool, function: Callable[[], Any], limit_s: float, close_late: Callable[[Any], Any] | None = None
) -> Any:
    """Call a function that may block or return an awaitable, and return its result.

    Python cannot end a blocking call. If it returns after the limit, its thread passes the result to `close_late`.

    Raises:
        EnvTimeout: it exceeded the limit. `threads` has the same limit.
        Exception: its error. An error that is no `Exception` becomes a RuntimeError.
    """
    late = _LateCall(function, close_late)
    result = await threads.run(late, late)
    return await await_with_timeout(run_contained(result), limit_s) if inspect.isawaitable(result) else result


async def run_contained(awaitable: Awaitable[T]) -> T:
    """Await user code in a separate task, so that it cannot cancel its caller. Raise its error as an `Exception`."""

    async def run() -> T:
        with errors_as_exceptions():
            return await awaitable

    with errors_as_exceptions():
        return await asyncio.create_task(run())


class _LateCall:
    """A blocking call whose result is closed if it returns after it was abandoned."""

    is_stuck = False

    def __init__(self, function: Callable[[], Any], close: Callable[[Any], Any] | None) -> None:
        self._function = function
        self._close = close
        self._result: Any = None

    def __call__(self) -> Any:
        self._result = self._function()
        return self._result

    def close_late(self) -> None:
        """Close the result, in the call's thread. A coroutine that was never awaited has no side effects."""
        result, self._result = self._result, None
        try:
            if inspect.iscoroutine(result):
                result.close()
            elif result is not None and self._close is not None and inspect.isawaitable(closing := self._close(result)):
                asyncio.run(run_contained(closing))
        except BaseException:  # the trajectory has already been reported as invalid
            logger.warning("Closing the result of a call that took too long failed", exc_info=True)


@dataclass(slots=True)
class Outcome:
    """The result of an agent's work."""

    finish_reason: str  # never empty, e.g. "FINISH_TOOL" or "max_iterations_reached"
    result: Any = None  # what the task evaluates, e.g. an answer


class BaseAgent(ABC):
    """Base class for agents. Each trajectory gets a new instance.

    Subclasses implement `run`: call `self.chat.generate` as often as needed and return an `Outcome`.
    """

    def __init__(self, context: AgentContext) -> None:
        """Set the context."""
        self.context = context
        self.chat = context.chat
        self.instance = context.instance

    @classmethod
    def create_tools(cls, tools: Any) -> dict[str, BaseTool]:
        """Create a trajectory's tools from the `tools` of the task file. Raises ConfigError if they are invalid."""
        if isinstance(tools, Mapping):
            raise ConfigError(f"tools: {cls.__name__} takes a list of tools; got the section {dict(tools)}")
        return create_tools(tools)

    async def call_tool(self, tool: BaseTool, arguments: dict[str, Any]) -> Any:
        """Call a tool in a thread, and return its result.

        Raises:
            ToolCallError: the arguments do not match the tool. The message is for the model.
            EnvTimeout: the call exceeded `generator.tool_timeout`.
        """
        arguments = tool.check(arguments)
        self.context.tool_calls[tool.name] = self.context.tool_calls.get(tool.name, 0) + 1
        call = partial(tool.call, arguments, agent=self, trajectory_id=self.context.trajectory_id)
        return await call_with_limit(self.context.tool_threads, call, self.context.settings.tool_timeout)

    def set_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the history, e.g. on behalf of a tool."""
        self.chat.reset(messages)

    @abstractmethod
    async def run(self) -> Outcome:
        """Work on the task until it is finished or given up.

        Runs in the event loop that all trajectories share: call blocking code with `asyncio.to_thread`. The trajectory
        is invalid if this raises or returns nothing within `generator.trajectory_timeout` seconds.
        """
