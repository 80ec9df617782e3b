"""PyTorch, imported on first use.

`algorithms` and `types` import `torch` from here. Checking a configuration needs the registered estimators and losses,
and must not wait for PyTorch to load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch as torch
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            self.__dict__[name] = value  # the next access finds it without this method
            return value

    torch = _LazyTorch()

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def no_grad(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function like `torch.no_grad()`, without importing PyTorch yet."""

    @wraps(function)
    def detached(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return detached
