"""Calls of environment methods. Every method may have an asynchronous variant, which is preferred: `step_async` (if it
is a coroutine function) to `step`, and so on.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


def async_method(env: Any, name: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
    """Return the asynchronous variant of the method `name`, or None if the environment has none."""
    native = getattr(env, f"{name}_async", None)
    return native if inspect.iscoroutinefunction(native) else None


@contextmanager
def end_forked_children() -> Iterator[None]:
    """End a child process that forked within the context and leaves it: its parent alone continues.

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
    """Call the method `name`, preferably its asynchronous variant, in the event loop of `runner`."""
    native = async_method(env, name)
    return getattr(env, name)(*args) if native is None else runner.run(native(*args))
