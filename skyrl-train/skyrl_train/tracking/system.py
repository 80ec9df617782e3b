"""Metrics of the machine."""

from __future__ import annotations

from contextlib import suppress

import psutil
import torch

GIGABYTE = 1e9


def system_metrics() -> dict[str, float]:
    """Return `system/memory_usage`: the peak of this process on the GPU, or else its memory, in gigabytes.

    On a GPU also `system/gpu_utilization` in percent, if `nvidia-ml-py` is installed.
    """
    if not torch.cuda.is_available():
        return {"system/memory_usage": psutil.Process().memory_info().rss / GIGABYTE}
    metrics = {"system/memory_usage": torch.cuda.max_memory_allocated() / GIGABYTE}
    with suppress(ModuleNotFoundError, RuntimeError):  # no nvidia-ml-py, or a driver that does not answer
        metrics["system/gpu_utilization"] = float(torch.cuda.utilization())
    return metrics
