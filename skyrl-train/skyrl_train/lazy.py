"""PyTorch, imported at its first use.

`algorithms` and `types` import `torch` from here, so that the rules of a configuration, which read the registered
estimators and losses, are checked without loading it.
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
    """Decorate a function as `torch.no_grad()` does."""

    @wraps(function)
    def detached(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return detached
