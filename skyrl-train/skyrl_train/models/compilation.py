"""Compile elementwise formulas to one GPU kernel each, if PyTorch can compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_VARIANTS = 64
"""Maximum number of compiled variants of a formula, one for each dtype, size of the last dimensions and kind of
gradients."""


def compiled_on_gpu(formula: Callable[P, T]) -> Callable[P, T]:
    """Compile `formula` for calls whose first argument is a tensor on a GPU.

    The first dimension of that tensor counts tokens. It is dynamic: calls with another number of tokens do not
    recompile. So is the first dimension of every tensor of the same length. Without a compiler, or with
    `TORCH_COMPILE_DISABLE=1`, the formula runs eagerly.
    """
    compiled = None

    @wraps(formula)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal compiled
        first = args[0]
        if not (isinstance(first, torch.Tensor) and first.is_cuda and can_compile()):
            return formula(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(formula)
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) == len(first):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args, **kwargs)

    return call


@cache
def can_compile() -> bool:
    """Return True if PyTorch can compile for this GPU. It needs Triton and a C compiler."""
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    torch._inductor.config.compile_threads = 1  # a few small kernels are not worth a pool of processes
    try:
        torch.compile(torch.neg)(torch.ones(8, device="cuda"))
    except RuntimeError as error:  # the base class of all compiler errors
        logger.info("The sums of the head are not compiled: %s", error)
        return False
    return True
