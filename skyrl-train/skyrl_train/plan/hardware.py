"""The memory and speed of the machine that a run is planned for: this one, or any with a known GPU."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU."""

    name: str
    memory_bytes: float
    flops: float
    """The vendor's peak FLOP/s for dense bfloat16 matrix products."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""


GPUS = tuple(
    Gpu(name, gib * GIB, tflops * 1e12, gigabytes * 1e9)
    for name, gib, tflops, gigabytes in (
        ("B200", 180, 2250, 8000),
        ("H200", 140, 989, 4800),
        ("H100 PCIe", 80, 756, 2000),
        ("H100 NVL", 94, 835, 3900),
        ("H100", 80, 989, 3350),
        ("A100", 80, 312, 2000),
        ("L40S", 45, 362, 864),
        ("L4", 22.5, 121, 300),
        ("A10G", 22.5, 70, 600),
        ("A10", 22.5, 125, 600),
        ("RTX 5090", 31.8, 210, 1790),
        ("RTX 4090", 24, 165, 1008),
        ("RTX 3090", 24, 71, 936),
    )
)
"""GPUs with known speed, from their data sheets. The memory is what the driver reports."""


def find_gpu(name: str) -> Gpu | None:
    """Return the first of `GPUS` whose name is part of a device's name, or None for a slice of a GPU (MIG).

    `RTX` may be left out: `4090` is an RTX 4090.
    """
    if re.search(r"\bMIG\b", name):
        return None
    names = {gpu.name.removeprefix("RTX "): gpu for gpu in GPUS}
    return next((gpu for short, gpu in names.items() if re.search(rf"\b{short}\b", name, re.IGNORECASE)), None)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machines of a run."""

    device: str
    """Name of the device that computes, e.g. `NVIDIA H100 80GB HBM3` or `CPU, 2 threads`."""
    device_bytes: float | None
    """Free memory of each GPU, or None on a machine without GPUs, whose device is the host."""
    host_bytes: float
    """Free memory of each node."""
    gpu: Gpu | None = None
    """The type of GPU, if it is known."""

    @property
    def has_gpus(self) -> bool:
        return self.device_bytes is not None


def free_host_bytes() -> int:
    """Return the memory that this process may still allocate: what is free on the machine and in its cgroups.

    In a container, `psutil` reports the whole machine, but the kernel kills a process at the limit of its cgroup. Files
    in the page cache count towards the limit, but the kernel drops them first.
    """
    free = [psutil.virtual_memory().available]
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return free[0]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "memory":
            root, limit, usage, cache = CGROUPS / "memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"
        elif not controllers:
            root, limit, usage, cache = CGROUPS, "max", "current", "inactive_file"
        else:
            continue
        # In a container, the path is that of the host, and the root of the mount is the container's own cgroup.
        own = root / name.lstrip("/")
        for folder in (own, *own.parents) if own.is_dir() else (root,):
            if not folder.is_relative_to(root):
                break
            try:
                statistics = dict(pair.split() for pair in (folder / "memory.stat").read_text().splitlines())
                n_limit = (folder / f"memory.{limit}").read_text().strip()
                n_used = int((folder / f"memory.{usage}").read_text()) - int(statistics.get(cache, 0))
            except OSError:  # the root has no limit
                continue
            if n_limit != "max":
                free.append(max(0, int(n_limit) - n_used))
    return min(free)


def free_gpu_bytes(n_gpus: int) -> int:
    """Return the free memory of the fullest of the first `n_gpus` visible GPUs, on which ranks will start.

    `torch.cuda.mem_get_info` would create a CUDA context that takes hundreds of MB until the process ends, on a GPU
    that this process may not use. Raise RuntimeError if nvidia-ml-py is not installed, or the driver does not answer.
    """
    try:
        import pynvml
    except ImportError as error:
        raise RuntimeError("nvidia-ml-py is not installed") from error

    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
        gpus = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in map(str.strip, names[:n_gpus])
        ]
        return min(int(pynvml.nvmlDeviceGetMemoryInfo(gpu).free) for gpu in gpus)
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML reports: {error}") from error


def this_machine(n_ranks: int | None = None) -> Hardware:
    """Return the hardware of this machine, with the memory that is free now. PyTorch must be imported.

    `n_ranks` is the number of processes on it, or None for a run in this process. Raise RuntimeError as
    `free_gpu_bytes` does.
    """
    import torch

    # A run continues in this process, so its memory counts as free.
    host = free_host_bytes() + (psutil.Process().memory_info().rss if n_ranks is None else 0)
    if not torch.cuda.is_available():
        return Hardware(f"CPU, {torch.get_num_threads()} threads", None, host)
    free = torch.cuda.mem_get_info()[0] if n_ranks is None else free_gpu_bytes(n_ranks)
    name = torch.cuda.get_device_name()
    return Hardware(name, free, host, find_gpu(name))
