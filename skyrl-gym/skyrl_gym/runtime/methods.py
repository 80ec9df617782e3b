"""Calls of environment methods.

Every method may have an asynchronous variant, e.g. `step_async` for `step`. The variant is preferred if it is a
coroutine function.
"""

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


def async_method(env: Any, name: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
    """Return the asynchronous variant of the method `name`, or None if there is none."""
    native = getattr(env, f"{name}_async", None)
    return native if inspect.iscoroutinefunction(native) else None


@contextmanager
def end_forked_children() -> Iterator[None]:
    """End any child process that forks inside the context and leaves it, so that only the parent continues.

    An environment that calls `os.fork` and returns in both processes would otherwise leave a second worker on the same
    socket, or a second trainer.
    """
    parent = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != parent:
            os._exit(0)


def call_method(env: Any, runner: asyncio.Runner, name: str, *args: Any) -> Any:
    """Call the method `name`, or its asynchronous variant in the event loop of `runner` if it has one."""
    native = async_method(env, name)
    return getattr(env, name)(*args) if native is None else runner.run(native(*args))
