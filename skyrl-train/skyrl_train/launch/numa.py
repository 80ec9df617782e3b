"""NUMA affinity: a rank runs on the cores next to its GPU, where the memory that it allocates is then placed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")
"""Folder in which the kernel describes devices and nodes."""


def bind_to_gpu(index: int) -> None:
    """Run the calling thread, and those that it starts, on the cores of the GPU's NUMA node."""
    gpu: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack the address
    bind_to_device(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def bind_to_device(address: str) -> None:
    """Run the calling thread, and those that it starts, on the cores of the NUMA node of a PCI device.

    Does nothing if the kernel assigns the device to no node, or if this process may use no core of the node.

    Args:
        address: of the device, e.g. "0000:3b:00.0".
    """
    try:
        node = int((SYSFS / "bus/pci/devices" / address / "numa_node").read_text())
        cores = parse_cores((SYSFS / f"devices/system/node/node{node}/cpulist").read_text())
    except OSError:  # another system than Linux, or node -1: the device belongs to none
        return
    if usable := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, usable)
        logger.info("Running on the %d cores of NUMA node %d, next to the GPU %s", len(usable), node, address)


def parse_cores(text: str) -> set[int]:
    """Parse the kernel's list of cores: "0-3,8" are 0, 1, 2, 3 and 8."""
    spans = (part.split("-") for part in text.strip().split(",") if part)
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
