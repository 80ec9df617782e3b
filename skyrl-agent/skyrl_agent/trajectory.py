"""An agent's attempt at an instance, in three phases: initialize, generate, evaluate."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_agent.agents.base import AgentContext, BaseAgent, Outcome, call_with_limit, run_contained
from skyrl_agent.chat import Chat, ContextWindowExceeded, EngineAborted, PromptTooLong
from skyrl_agent.config import AgentConfig
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tools.base import BaseTool, close_tools
from skyrl_gym.envs.entry_point import select_arguments
from skyrl_gym.runtime.env_pool import ThreadPool, errors_as_exceptions
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.runtime.validation import validate_metrics, validate_reward
from skyrl_gym.stop_reasons import StopReason
from skyrl_train.errors import DataError, EngineError
from skyrl_train.generators.rollout import Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """The part of a dataset row that the task receives, with its names."""

    data: Any
    instance_id: str
    data_source: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any], default_id: str, cfg: AgentConfig) -> Instance:
        """Select the columns named in the task file's `data`.

        Raises:
            DataError: a column is missing.
        """
        keys = cfg.data
        data = row if keys.instance_key is None else _value_at(row, keys.instance_key)
        instance_id = default_id if keys.instance_id_key is None else _value_at(row, keys.instance_id_key)
        source = row.get("data_source") if keys.data_source_key is None else _value_at(row, keys.data_source_key, None)
        return cls(data, str(instance_id), str(source or "default"))


_REQUIRED: Any = object()


def _value_at(row: Any, key: str, default: Any = _REQUIRED) -> Any:
    """Return the value at a dotted path."""
    value = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            if default is _REQUIRED:
                raise DataError(f"the row has no column {key}; its columns are {', '.join(map(str, row))}")
            return default
        value = value[name]
    return value


async def finish(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to completion even if this task is cancelled, then raise the cancellation."""
    task, cancellation = asyncio.ensure_future(coroutine), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
        except Exception:  # noqa: BLE001, raised below
            break
    if cancellation is not None:
        raise cancellation
    task.result()


class AgentTrajectory:
    """An attempt. Phases never raise: an error makes the rollout invalid, and later phases do nothing."""

    def __init__(
        self,
        rollout: Rollout,
        cfg: AgentConfig,
        agent_cls: type[BaseAgent],
        task: type[BaseTask],
        chat: Chat,
        task_threads: ThreadPool,
        tool_threads: ThreadPool,
    ) -> None:
        """Create an attempt. The threads run the methods of the task and of tools."""
        self.rollout = rollout
        self.env: str | None = None  # one of `dispatcher.envs`
        self.finish_reason: str | None = None  # set when the agent has ended
        self.tool_calls: dict[str, int] = {}
        self._cfg = cfg
        self._agent_cls = agent_cls
        self._task = task
        self._chat = chat
        self._task_threads = task_threads
        self._tool_threads = tool_threads
        self._instance: Instance | None = None
        self._tools: dict[str, BaseTool] = {}
        self._runtime: Any = None
        self._result: Any = None
        self._has_session = True

    @property
    def has_failed(self) -> bool:
        """True if the rollout is invalid."""
        return self.rollout.error is not None

    async def initialize_trajectory(self) -> None:
        """Start the runtime and get the instruction."""
        await self._run_phase(self._initialize, "error_initialization")

    async def generate_trajectory(self) -> None:
        """Run the agent and collect its result."""
        if not self.has_failed:
            await self._run_phase(self._generate, "error_runtime")

    async def evaluate_trajectory(self) -> None:
        """Grade the result."""
        if not self.has_failed:
            await self._run_phase(self._evaluate, "error_evaluation")

    async def close(self) -> None:
        """Release the runtime, the tools and the engine's cache. Idempotent."""
        await finish(self._close())

    async def _close(self) -> None:
        runtime, self._runtime = self._runtime, None
        tools, self._tools = self._tools, {}
        has_session, self._has_session = self._has_session, False
        if runtime is not None:
            await self._release("close_runtime", self._call(lambda: self._task.close_runtime(runtime)))
        if tools:
            await self._release("tools", self._call(lambda: close_tools(tools.values())))
        if has_session:
            await self._release("the engine's session", self._chat.close())

    async def _release(self, name: str, closing: Awaitable[Any]) -> None:
        try:
            with errors_as_exceptions():
                await closing
        except Exception:  # the trajectory keeps its result
            logger.warning(
                "%s: %s was not closed after rollout %s",
                *(self._task.__name__, name, self.rollout.request.id.to_string()),
                exc_info=True,
            )

    async def _run_phase(self, phase: Callable[[], Awaitable[None]], stop_reason: str) -> None:
        started, generated_s = time.perf_counter(), self.rollout.generate_s
        try:
            with errors_as_exceptions():
                await phase()
        except EngineError as error:
            self.rollout.fail(
                StopReason.ABORT if isinstance(error, EngineAborted) else StopReason.ENGINE_ERROR, str(error), error
            )
        except PromptTooLong as error:
            self.rollout.fail(StopReason.PROMPT_TOO_LONG, str(error))
        except Exception as error:  # noqa: BLE001, the boundary of a rollout
            self.rollout.fail(stop_reason, f"{self._task.__name__}: {describe_error(error)}", error)
        finally:
            self.rollout.env_s += time.perf_counter() - started - (self.rollout.generate_s - generated_s)

    async def _initialize(self) -> None:
        row = self.rollout.request.row
        columns = copy.deepcopy({**row.env_extras, "prompt": row.prompt} if row.prompt else row.env_extras)
        self._instance = Instance.from_row(columns, row.uid, self._cfg)
        if inspect.iscoroutinefunction(self._task.initialize_runtime):
            await self._start()  # if cancelled, it releases what it has started
        else:
            await finish(self._start())  # it closes the runtime of a start that exceeds its limit
        self._chat.reset(await self._call_task("get_instruction", runtime=self._runtime))

    async def _start(self) -> None:
        self._runtime = await self._call_task("initialize_runtime", env=self.env, close_late=self._task.close_runtime)

    async def _create_tools(self) -> None:
        self._tools = await call_with_limit(
            self._tool_threads,
            lambda: self._agent_cls.create_tools(self._cfg.tools),
            self._cfg.generator.tool_timeout,
            lambda tools: close_tools(tools.values()),
        )

    async def _generate(self) -> None:
        assert self._instance is not None
        await finish(self._create_tools())
        context = AgentContext(
            self._chat,
            self._tools,
            self._cfg.generator,
            self._instance.data,
            self.rollout.request.id.to_string(),
            self._runtime,
            self._tool_threads,
            self.tool_calls,
        )
        self.finish_reason, self._result = await self._run_agent(context)
        if not self.rollout.turns:
            raise RuntimeError(f"{self._agent_cls.__name__} ended before the model took a turn")
        collected = await self._call_task("complete_runtime", runtime=self._runtime)
        if collected is not None and collected != {}:  # SkyRL-Agent's tasks return {} if there is nothing to collect
            self._result = collected

    async def _run_agent(self, context: AgentContext) -> tuple[str, Any]:
        """Return the agent's finish reason and result."""
        name, limit = self._agent_cls.__name__, asyncio.timeout(self._cfg.generator.trajectory_timeout)
        try:
            async with limit:
                outcome = await run_contained(self._agent_cls(context).run())
        except ContextWindowExceeded:
            return "CONTEXT_WINDOW_EXCEEDED", None
        except TimeoutError:
            if limit.expired():
                limit_s = self._cfg.generator.trajectory_timeout
                self.rollout.fail(
                    StopReason.TRAJECTORY_TIMEOUT,
                    f"{name} had no result after generator.trajectory_timeout={limit_s:g} s",
                )
            raise  # the first failure counts
        if not isinstance(outcome, Outcome) or not isinstance(outcome.finish_reason, str) or not outcome.finish_reason:
            raise TypeError(f'{name}.run returned {outcome!r}; return an Outcome with a reason, such as "FINISH"')
        return outcome.finish_reason, outcome.result

    async def _evaluate(self) -> None:
        graded = await self._call_task("evaluate_result", result=self._result, finish_reason=self.finish_reason)
        metrics: dict[str, Any] = {}
        if isinstance(graded, Mapping):
            metrics = dict(graded)
            graded = metrics.pop("reward", None)
        reward = validate_reward(float(graded) if isinstance(graded, bool) else graded, "evaluate_result")
        if reward is None:
            raise ValueError("evaluate_result returned None: the reward is unknown")
        self.rollout.turns[-1].reward = reward
        self.rollout.env_metrics = validate_metrics(metrics)
        self.rollout.stop_reason = self.finish_reason

    async def _call_task(self, name: str, close_late: Callable[[Any], Any] | None = None, **arguments: Any) -> Any:
        """Call a method of the task (see `BaseTask`). A result after the limit goes to `close_late`."""
        method, instance = getattr(self._task, name), self._instance
        assert instance is not None
        arguments |= {
            "instance": instance.data,
            "data_source": instance.data_source,
            "instance_id": instance.instance_id,
            "trajectory_id": self.rollout.request.id.repetition_id,
            "tokenizer": self._chat.tokenizer,
        }
        return await self._call(lambda: method(**select_arguments(method, arguments)), close_late)

    async def _call(self, function: Callable[[], Any], close_late: Callable[[Any], Any] | None = None) -> Any:
        limit_s = self._cfg.generator.task_timeout
        return await call_with_limit(self._task_threads, function, limit_s, close_late)
