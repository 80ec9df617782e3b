"""Calls of environment methods. Every method may have an asynchronous variant, which is preferred: `step_async` (if it
is a coroutine function) to `step`, and so on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any


def async_method(env: Any, name: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
    """Return the asynchronous variant of the method `name`, or None if the environment has none."""
    native = getattr(env, f"{name}_async", None)
    return native if inspect.iscoroutinefunction(native) else None


def call_method(env: Any, runner: asyncio.Runner, name: str, *args: Any) -> Any:
    """Call the method `name`, preferably its asynchronous variant, in the event loop of `runner`."""
    native = async_method(env, name)
    return getattr(env, name)(*args) if native is None else runner.run(native(*args))
