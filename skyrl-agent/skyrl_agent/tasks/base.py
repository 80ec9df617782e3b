"""Base class for tasks."""

from abc import ABC, abstractmethod
from typing import Any

from skyrl_train.types import Message


class BaseTask(ABC):
    """Base class for tasks. Its methods are class methods. Each may block, or be a coroutine function.

    A method receives the arguments that its signature names, by name, and all of them with `**kwargs`:

        instance: the instance, see `data.instance_key`
        data_source: the name of its dataset
        instance_id, trajectory_id: the names of instance and trajectory
        tokenizer: the tokenizer of the model
        runtime: the result of `initialize_runtime` (not for that method)
        env: one of `dispatcher.envs`, or None (`initialize_runtime`)
        result: the agent's result, or `complete_runtime`'s if that is neither None nor empty (`evaluate_result`)
        finish_reason: e.g. "FINISH_TOOL" or "max_iterations_reached" (`evaluate_result`)
    """

    @classmethod
    def initialize_runtime(cls, *args: Any, **kwargs: Any) -> Any:
        """Start and return the runtime that the agent works with, such as a container. Default: none.

        If it is a coroutine function and is cancelled, it must release what it has started. If it blocks, the caller
        waits for it and closes its runtime.
        """
        return None

    @classmethod
    @abstractmethod
    def get_instruction(cls, *args: Any, **kwargs: Any) -> list[Message]:
        """Return the first messages of the agent's history."""

    @classmethod
    def complete_runtime(cls, *args: Any, **kwargs: Any) -> Any:
        """Collect the result from the runtime, such as a patch. Return None to use the agent's own result."""
        return None

    @classmethod
    @abstractmethod
    def evaluate_result(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a result's reward: a number, a boolean, or a mapping with `reward` and metrics.

        Raise an error if the reward is unknown, for instance because a judge does not answer. The trajectory is then
        invalid, and no baseline or metric reads its reward.
        """

    @classmethod
    def close_runtime(cls, runtime: Any) -> Any:
        """Release the runtime. The default calls its `close`, if it has one."""
        close = getattr(runtime, "close", None)
        return close() if close is not None else None

    @classmethod  # noqa: B027, optional
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for an instance that cannot be graded. Called per row before a run, with an empty
        `prompt`.
        """
