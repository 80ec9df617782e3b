"""Metrics of the machine."""

from contextlib import suppress

import psutil
import torch

from skyrl_train.plan.hardware import find_gpu
from skyrl_train.timer import GIGABYTE, peak_memory


def peak_flops() -> float | None:
    """Return the peak bfloat16 FLOP/s of this GPU, or None for a CPU, a slice of a GPU (MIG) or an unknown device."""
    if not torch.cuda.is_available():
        return None
    gpu = find_gpu(torch.cuda.get_device_name())
    return None if gpu is None else gpu.flops


def system_metrics() -> dict[str, float]:
    """Return metrics of this machine and process.

    - `system/memory_usage`: peak GPU memory of this process in GB, or on a CPU its resident memory.
    - `system/cpu_utilization`: utilization of all cores since the last call, in percent.
    - `system/gpu_utilization`: in percent, only on a GPU that reports it, with `nvidia-ml-py` installed.
    """
    metrics = {"system/cpu_utilization": psutil.cpu_percent()}
    if not torch.cuda.is_available():
        return metrics | {"system/memory_usage": psutil.Process().memory_info().rss / GIGABYTE}
    metrics["system/memory_usage"] = max(peak_memory.highest, torch.cuda.max_memory_reserved()) / GIGABYTE
    with suppress(Exception):  # no nvidia-ml-py, a slice of a GPU (MIG), a driver that does not answer
        metrics["system/gpu_utilization"] = float(torch.cuda.utilization())
    return metrics
