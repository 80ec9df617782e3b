"""Run Megatron-Core on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnCPU(TorchFunctionMode):
    """Create tensors for the device "cuda" on the CPU, and make `Tensor.cuda` a no-op."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Run Megatron-Core on `device`.

    Its modules, collectives and schedules allocate buffers on `torch.cuda.current_device()` or "cuda". If `device` is a
    CPU, both mean the CPU inside this context.
    """
    if device.type == "cuda":
        yield
        return
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _OnCPU():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize
