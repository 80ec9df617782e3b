"""Metrics of the machine."""

import re
from contextlib import suppress

import psutil
import torch

from skyrl_train.timer import GIGABYTE, peak_memory

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""The vendor's peak FLOP/s for dense bfloat16 matrix products. Keys are matched as words of the device name, and the
first match counts."""


def peak_flops() -> float | None:
    """Return the peak bfloat16 FLOP/s of this GPU, or None for a CPU, a slice of a GPU (MIG) or an unknown device."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name()
    if re.search(r"\bMIG\b", words):
        return None
    return next((rate for name, rate in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", words)), None)


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
