"""A description of a machine with NUMA nodes, as the kernel gives it."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from skyrl_train.launch import numa

GPU = "0000:3b:00.0"
MAX_CORE = max(os.sched_getaffinity(0))


def write_sysfs(sysfs: Path, node: int, cores: str) -> Path:
    """Describe a machine whose GPU belongs to `node`; node 1 has `cores`."""
    device, node_1 = sysfs / "bus/pci/devices" / GPU, sysfs / "devices/system/node/node1"
    for folder in (device, node_1):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (node_1 / "cpulist").write_text(f"{cores}\n")
    return sysfs


def imitate_gpus(sysfs: Path) -> None:
    """Give this process GPUs without a driver, and the machine at `sysfs`. GPU 0 is the GPU of `write_sysfs`."""
    cuda: Any = torch.cuda
    chosen = [0]
    cuda.set_device = lambda device: chosen.append(device.index)
    cuda.current_device = lambda: chosen[-1]
    cuda.get_device_properties = lambda index: SimpleNamespace(
        pci_domain_id=0, pci_bus_id=0x3B + index, pci_device_id=0
    )
    numa.SYSFS = sysfs
