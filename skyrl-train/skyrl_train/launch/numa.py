"""NUMA affinity: compute on the cores next to the GPU, so that host memory is allocated there."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")
"""Where the kernel describes devices and NUMA nodes."""


def bind_to_gpu() -> None:
    """Pin the calling thread and the threads it starts to the cores of the NUMA node of the current GPU."""
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # torch's stubs lack the PCI address
    bind_to_device(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def bind_to_device(address: str) -> None:
    """Pin the calling thread and the threads it starts to the cores of a PCI device's NUMA node.

    Does nothing if the device (e.g. "0000:3b:00.0") has no node, or if this process may not use or pin to its cores.
    """
    try:
        node = int((SYSFS / "bus/pci/devices" / address / "numa_node").read_text())
        cores = parse_cores((SYSFS / f"devices/system/node/node{node}/cpulist").read_text())
        if usable := cores & os.sched_getaffinity(0):
            os.sched_setaffinity(0, usable)
    except OSError:  # not Linux, node -1 (the device has no node), or a sandbox that forbids pinning
        return
    if usable:
        logger.info("Running on the %d cores of NUMA node %d, next to the GPU %s", len(usable), node, address)


def parse_cores(text: str) -> set[int]:
    """Parse the kernel's list of cores: "0-3,8" are 0, 1, 2, 3 and 8."""
    spans = (part.split("-") for part in text.strip().split(",") if part)
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
