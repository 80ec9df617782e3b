"""The interface of tasks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from skyrl_train.types import Message


class BaseTask(ABC):
    """A task. Its methods are class methods; each may block, or be a coroutine function.

    A method receives the arguments that its signature names, by name, and all of them with `**kwargs`:

        instance: the instance, see `data.instance_key`
        data_source: the name of its dataset
        instance_id, trajectory_id: the names of instance and trajectory
        tokenizer: the tokenizer of the model
        runtime: the result of `initialize_runtime` (not for that method)
        env: one of `dispatcher.envs`, or None (`initialize_runtime`)
        result: the agent's result, or that of `complete_runtime` if it is neither None nor empty (`evaluate_result`)
        finish_reason: e.g. "FINISH_TOOL" or "max_iterations_reached" (`evaluate_result`)
    """

    @classmethod
    def initialize_runtime(cls, *args: Any, **kwargs: Any) -> Any:
        """Start what the agent works with, such as a container; by default nothing.

        A coroutine function that is cancelled must release what it has started. A blocking one is waited for, and its
        runtime is closed.
        """
        return None

    @classmethod
    @abstractmethod
    def get_instruction(cls, *args: Any, **kwargs: Any) -> list[Message]:
        """Return the messages that the agent starts with."""

    @classmethod
    def complete_runtime(cls, *args: Any, **kwargs: Any) -> Any:
        """Collect the result from the runtime, such as a patch. None for the agent's own result."""
        return None

    @classmethod
    @abstractmethod
    def evaluate_result(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the reward of a result: a number or a truth value, or a mapping with `reward` and metrics.

        Raise an error if it is unknown, for instance because a judge does not answer: the trajectory is then invalid,
        and no baseline or metric reads its reward.
        """

    @classmethod
    def close_runtime(cls, runtime: Any) -> Any:
        """Release the runtime; by default, call its `close`, if it has one."""
        close = getattr(runtime, "close", None)
        return close() if close is not None else None

    @classmethod  # noqa: B027, optional
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for an instance that cannot be graded. Called for each row before a run, with an
        empty `prompt`.
        """


def select_arguments(method: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that the signature of a method names, or all of them if it has `**kwargs`."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
