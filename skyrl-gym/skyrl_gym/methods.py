"""How an environment's methods are called: `step_async`, if it is a coroutine function, comes before `step`.

So it is with the others. Whoever calls environments, in threads, in a process or by hand, asks here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any


def awaited_method(env: Any, name: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
    """What is awaited in place of the blocking method `name`; None where the environment has no such thing."""
    native = getattr(env, f"{name}_async", None)
    return native if inspect.iscoroutinefunction(native) else None


def call(env: Any, runner: asyncio.Runner, name: str, *args: Any) -> Any:
    """What the method `name` returns; if it is awaited, in the event loop of `runner`."""
    native = awaited_method(env, name)
    return getattr(env, name)(*args) if native is None else runner.run(native(*args))
