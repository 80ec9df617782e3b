"""One attempt of an agent at an instance, in three phases: initialize, generate, evaluate."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_agent.agents.base import AgentContext, BaseAgent
from skyrl_agent.chat import Chat, ContextWindowExceeded, EngineAborted
from skyrl_agent.config import AgentConfig
from skyrl_agent.tasks.base import BaseTask, takes
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.runtime.validation import validate_metrics, validate_reward
from skyrl_train.errors import DataError, EngineError
from skyrl_train.generators.env_pool import ThreadPool
from skyrl_train.generators.rollout import Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """What the task receives of a dataset row."""

    data: Any
    instance_id: str
    data_source: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any], default_id: str, cfg: AgentConfig) -> Instance:
        """Select the columns that `data` of the task file names.

        Raises:
            DataError: the row lacks one.
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


class AgentTrajectory:
    """An attempt. Phases never raise: an error makes the rollout invalid, and later phases do nothing."""

    def __init__(
        self,
        rollout: Rollout,
        instance: Instance,
        cfg: AgentConfig,
        agent_cls: type[BaseAgent],
        task: type[BaseTask],
        chat: Chat,
        task_threads: ThreadPool,
        tool_threads: ThreadPool,
    ) -> None:
        """Take what the runner has created. Methods of the task and of tools run in the threads."""
        self.rollout = rollout
        self.instance = instance
        self.env: str | None = None  # one of `dispatcher.envs`
        self.finish_reason: str | None = None  # set when the agent has ended
        self.tool_calls: dict[str, int] = {}
        self._cfg = cfg
        self._agent_cls = agent_cls
        self._task = task
        self._chat = chat
        self._task_threads = task_threads
        self._tool_threads = tool_threads
        self._runtime: Any = None
        self._result: Any = None
        self._is_closed = False

    async def initialize_trajectory(self) -> None:
        """Start the runtime and get the instruction."""
        await self._run_phase(self._initialize, "error_initialization")

    async def generate_trajectory(self) -> None:
        """Let the agent work, collect its result, and close the runtime."""
        if self.rollout.error is None:
            await self._run_phase(self._generate, "error_runtime")

    async def evaluate_trajectory(self) -> None:
        """Grade the result."""
        if self.rollout.error is None:
            await self._run_phase(self._evaluate, "error_evaluation")

    async def close(self) -> None:
        """Release the runtime, and the engine's cache. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._chat.close()
        if self._runtime is not None:
            try:
                await self._call(lambda: self._task.close_runtime(self._runtime))
            except Exception:  # the trajectory keeps its result
                logger.warning(
                    "%s.close_runtime failed after rollout %s",
                    self._task.__name__,
                    self.rollout.request.id,
                    exc_info=True,
                )

    async def _run_phase(self, phase: Callable[[], Awaitable[None]], stop_reason: str) -> None:
        started, generated_s = time.perf_counter(), self.rollout.generate_s
        try:
            await phase()
        except EngineError as error:
            self.rollout.fail("abort" if isinstance(error, EngineAborted) else "engine_error", str(error), error)
        except Exception as error:  # noqa: BLE001, the boundary of a rollout
            self.rollout.fail(stop_reason, f"{self._task.__name__}: {describe_error(error)}", error)
        finally:
            self.rollout.env_s += time.perf_counter() - started - (self.rollout.generate_s - generated_s)

    async def _initialize(self) -> None:
        self._runtime = await self._call_task("initialize_runtime", env=self.env)
        self._chat.reset(await self._call_task("get_instruction", runtime=self._runtime))

    async def _generate(self) -> None:
        context = AgentContext(
            self._chat,
            self._agent_cls.create_tools(self._cfg.tools),
            self._cfg.generator,
            self.instance.data,
            self.rollout.request.id.to_string(),
            self._runtime,
            self._tool_threads,
            self.tool_calls,
        )
        try:
            outcome = await self._agent_cls(context).run()
            self.finish_reason, self._result = outcome.finish_reason, outcome.result
        except ContextWindowExceeded:
            self.finish_reason = "CONTEXT_WINDOW_EXCEEDED"
        if not self.rollout.turns:
            raise RuntimeError(f"{self._agent_cls.__name__} ended before the model took a turn")
        collected = await self._call_task("complete_runtime", runtime=self._runtime)
        self._result = self._result if collected is None else collected
        await self.close()

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

    async def _call_task(self, name: str, **arguments: Any) -> Any:
        """Return the result of a method of the task, see `BaseTask`."""
        method = getattr(self._task, name)
        instance = self.instance
        arguments |= {
            "instance": instance.data,
            "data_source": instance.data_source,
            "instance_id": instance.instance_id,
            "trajectory_id": self.rollout.request.id.repetition_id,
        }
        return await self._call(lambda: method(**takes(method, arguments)))

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function that may block, or return an awaitable."""
        result = await self._task_threads.run(function)
        return await result if inspect.isawaitable(result) else result
